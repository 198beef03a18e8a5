"""Temporary chip memory: what is taken, kept and given back, by the contract alone."""

import pytest
import torch

from backends.interface import Lifetime, ScratchArena
from backends.scratch import bucket_bytes

MIB = 1 << 20


class CountingSource:
    """Passes on to a device what a scratch arena asks, and counts it."""

    def __init__(self, device):
        self.device = device
        self.allocations = []
        self.reclaimed = []

    def allocate(self, shape, dtype):
        self.allocations.append(shape)
        return self.device.allocate(shape, dtype)

    def copy(self, source, target):
        self.device.copy(source, target)

    def reclaim(self, lifetime):
        self.reclaimed.append(lifetime)


@pytest.fixture
def source(device):
    return CountingSource(device)


@pytest.fixture
def scratch(source):
    return ScratchArena(source)


def step(scratch, *counts, operation="attention"):
    taken = [scratch.take(Lifetime.STEP, operation, (n, 3), torch.float32) for n in counts]
    scratch.reclaim(Lifetime.STEP)
    return taken


@pytest.mark.parametrize("lifetime", Lifetime)
def test_what_is_taken_is_apart_and_holds_what_is_copied_to_it(device, scratch, lifetime):
    slot = 4 if lifetime is Lifetime.REQUEST else None
    shapes = [(5,), (2, 3, 4), (1, 700), (0, 8), ()]
    values = [torch.full(shape, float(index)) for index, shape in enumerate(shapes)]
    taken = [scratch.take(lifetime, "norm", shape, torch.float32, slot) for shape in shapes]
    for value, tensor in zip(values, taken, strict=True):
        device.copy(value, tensor)
    for value, tensor in zip(values, taken, strict=True):
        assert tensor.is_contiguous()
        assert torch.equal(device.to_host(tensor), value)


def test_a_steady_step_takes_nothing_new_from_the_chip(source, scratch):
    step(scratch, 100_000, 7, 60_000, 200_000)
    step(scratch, 100_000, 7, 60_000, 200_000)
    taken_before = len(source.allocations)
    held_before = scratch.bytes_held
    for _ in range(50):
        step(scratch, 100_000, 7, 60_000, 200_000)
    assert len(source.allocations) == taken_before
    assert scratch.bytes_held == held_before
    assert source.reclaimed == [Lifetime.STEP] * 52


def test_steps_of_many_shapes_hold_little_more_than_the_largest(source, scratch):
    generator = torch.Generator().manual_seed(5)
    largest = 0
    for _ in range(400):
        counts = torch.randint(1, 100_000, (4,), generator=generator).tolist()
        largest = max(largest, sum(bucket_bytes(12 * count) for count in counts))
        step(scratch, *counts)
    assert scratch.bytes_held <= 1.25 * largest + MIB
    assert len(source.allocations) < 40


@pytest.mark.parametrize("wanted", [0, 1, 512, 513, 5000, 100_000, 12_345_678])
def test_sizes_are_rounded_up_by_a_quarter_at_most(wanted):
    assert wanted <= bucket_bytes(wanted) <= max(512, 1.25 * wanted + 512)
    assert bucket_bytes(wanted) % 512 == 0
    assert bucket_bytes(bucket_bytes(wanted)) == bucket_bytes(wanted)


def test_few_sizes_serve_all_shapes():
    assert len({bucket_bytes(size) for size in range(1, MIB, 97)}) < 50


def test_a_requests_memory_serves_the_next_request(source, scratch):
    for slot in (0, 1):
        scratch.take(Lifetime.REQUEST, "state", (1000,), torch.float32, slot)
    held = scratch.bytes_held
    scratch.reclaim(Lifetime.REQUEST, 0)
    assert scratch.bytes_by_operation() == {"state": bucket_bytes(4000)}
    scratch.take(Lifetime.REQUEST, "state", (990,), torch.float32, 7)
    assert (scratch.bytes_held, len(source.allocations)) == (held, 2)
    scratch.reclaim(Lifetime.REQUEST)
    assert scratch.bytes_by_operation() == {}


def test_lifetimes_end_apart_and_the_models_ends_them_all(source, scratch):
    scratch.take(Lifetime.STEP, "attention", (2 * MIB,), torch.uint8)
    scratch.take(Lifetime.REQUEST, "state", (512,), torch.uint8, 0)
    scratch.take(Lifetime.MODEL, "rotary", (1024,), torch.uint8)
    assert scratch.bytes_by_operation() == {"attention": 2 * MIB, "state": 512, "rotary": 1024}
    scratch.reclaim(Lifetime.STEP)
    assert scratch.bytes_by_operation() == {"state": 512, "rotary": 1024}
    peak = scratch.bytes_peak
    assert peak == scratch.bytes_held == 2 * MIB + 512 + 1024
    scratch.reclaim(Lifetime.MODEL)
    assert scratch.bytes_by_operation() == {}
    assert (scratch.bytes_held, scratch.bytes_peak) == (0, peak)
    assert source.reclaimed == [Lifetime.STEP, Lifetime.MODEL]


@pytest.mark.parametrize("lifetime", Lifetime)
def test_use_after_reclaim_is_seen_in_a_debugging_run(device, source, lifetime):
    scratch = ScratchArena(source, poisons=True)
    slot = 2 if lifetime is Lifetime.REQUEST else None
    numbers = scratch.take(lifetime, "softmax", (9,), torch.float32, slot)
    ids = scratch.take(lifetime, "sample", (4,), torch.int64, slot)
    device.copy(torch.ones(9), numbers)
    device.copy(torch.ones(4, dtype=torch.int64), ids)
    scratch.reclaim(lifetime, slot)
    assert device.to_host(numbers).isnan().all()
    assert device.to_host(ids).tolist() == [-1] * 4


def test_a_slot_is_named_for_requests_alone(scratch):
    with pytest.raises(AssertionError, match="slot None"):
        scratch.take(Lifetime.REQUEST, "state", (4,), torch.float32)
    with pytest.raises(AssertionError, match="slot 3"):
        scratch.take(Lifetime.STEP, "state", (4,), torch.float32, 3)


def test_a_devices_scratch_reclaims_what_its_own_kernels_keep(device, monkeypatch):
    seen = []
    monkeypatch.setattr(device, "reclaim", seen.append)
    device.scratch.reclaim(Lifetime.STEP)
    assert seen == [Lifetime.STEP]
