"""A chip that is full says so in one typed error, gives everything back, and goes on."""

import gc
from dataclasses import replace

import pytest
import torch

from backends.errors import OutOfMemory
from backends.interface import KVSpec, Lifetime, open_runtime
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from tests.backends.kernel_calls import KernelCalls

LIMIT_BYTES = 64 << 20
PIECE_BYTES = 4 << 20
SPEC = KVSpec(layers=2, kv_heads=2, head_size=32, block_tokens=16, dtype=torch.float32)
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}


@pytest.fixture
def limited(backend, config, device):  # noqa: ARG001 - as it was, at the end
    """A runtime and a chip of its own with a limit of 64 MiB."""
    runtime = open_runtime(backend, replace(config, memory_limit_bytes=LIMIT_BYTES))
    acquired = runtime.acquire(1)
    assert acquired.granted, acquired.rejected
    yield runtime, acquired.granted[0]
    acquired.granted[0].close()


def allocate(device, asked_bytes):
    """A tensor that is really there: where running out of memory shows late, it shows here."""
    tensor = device.allocate((asked_bytes,), torch.uint8)
    device.synchronize()
    return tensor


def fill(device, pieces):
    """Allocates until it fails."""
    while True:
        pieces.append(allocate(device, PIECE_BYTES))


def take(device, lifetime, shape, slot):
    """Scratch that is really there."""
    tensor = device.scratch.take(lifetime, "linear", shape, torch.float32, slot)
    device.synchronize()
    return tensor


def free_bytes(device):
    gc.collect()
    device.synchronize()
    return device.memory_info().free_bytes


def check_computes(runtime, device):
    """The chip still gives right results."""
    x, weight = torch.arange(12.0).view(3, 4), torch.ones(5, 4)
    found = KernelCalls(runtime, device)("linear", x, weight, None, None)
    assert torch.equal(found, REFERENCE["linear"](x, weight, None, None))


@pytest.mark.covers("allocate", dtype="float32")
def test_a_full_chip_refuses_and_takes_again_what_was_given_back(limited):
    runtime, device = limited
    check_computes(runtime, device)
    before = free_bytes(device)
    assert before <= LIMIT_BYTES
    for _ in range(3):
        pieces = []
        with pytest.raises(OutOfMemory, match="bytes"):
            fill(device, pieces)
        assert len(pieces) >= (before - 2 * PIECE_BYTES) // PIECE_BYTES
        assert len(pieces) <= LIMIT_BYTES // PIECE_BYTES
        pieces.clear()
        assert free_bytes(device) == before
        check_computes(runtime, device)


@pytest.mark.covers("allocate", dtype="float32")
def test_what_is_larger_than_the_chip_leaves_it_as_it_was(limited):
    runtime, device = limited
    kept = device.to_chip(torch.arange(1000.0))
    before = free_bytes(device)
    for asked in (LIMIT_BYTES + 1, 1 << 40):
        with pytest.raises(OutOfMemory, match="bytes"):
            allocate(device, asked)
    assert free_bytes(device) == before
    assert torch.equal(device.to_host(kept), torch.arange(1000.0))
    check_computes(runtime, device)


@pytest.mark.covers("pool", dtype="float32")
def test_a_pool_too_large_is_refused_with_the_numbers_and_a_smaller_one_fits(limited):
    runtime, device = limited
    block_bytes = runtime.kv_layout(SPEC).block_bytes
    before = free_bytes(device)
    too_many = LIMIT_BYTES // block_bytes + 1
    with pytest.raises(OutOfMemory, match=f"{too_many} KV blocks of {block_bytes} bytes"):
        runtime.create_memory_pool(device, SPEC, too_many)
    assert free_bytes(device) == before
    for _ in range(3):
        pool = runtime.create_memory_pool(device, SPEC, before // 2 // block_bytes)
        assert free_bytes(device) <= before - before // 2 + block_bytes
        pool.close()
        del pool
        assert free_bytes(device) == before
    check_computes(runtime, device)


@pytest.mark.covers("scratch", dtype="float32")
@pytest.mark.parametrize("lifetime", list(Lifetime), ids=lambda lifetime: lifetime.value)
def test_scratch_too_large_is_refused_and_all_of_it_comes_back(limited, lifetime):
    runtime, device = limited
    slot = 3 if lifetime is Lifetime.REQUEST else None
    device.scratch.reclaim(Lifetime.MODEL)
    before = free_bytes(device)
    take(device, lifetime, (1000,), slot)
    with pytest.raises(OutOfMemory, match="bytes"):
        take(device, lifetime, (LIMIT_BYTES,), slot)
    taken = take(device, lifetime, (2000,), slot)
    device.copy(torch.arange(2000.0), taken)
    assert torch.equal(device.to_host(taken), torch.arange(2000.0))
    assert set(device.scratch.bytes_by_operation()) >= {"linear"}
    del taken
    device.scratch.reclaim(lifetime, slot)
    device.scratch.reclaim(Lifetime.MODEL)
    assert device.scratch.bytes_by_operation() == {}
    assert free_bytes(device) == before
    check_computes(runtime, device)
