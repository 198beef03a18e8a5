"""A device's memory and order of work, by the contract alone."""

import gc

import pytest
import torch

from backends.device import EagerProgram
from backends.errors import OutOfMemory
from backends.interface import BackendConfig, Lifetime, open_runtime


def test_copies_to_the_chip_and_back(device):
    source = torch.arange(60.0).view(3, 4, 5)
    on_chip = device.to_chip(source)
    source_before = source.clone()
    source.zero_()
    assert torch.equal(device.to_host(on_chip), source_before)


def test_what_was_asked_before_a_fence_may_be_read_after_it(device):
    first = device.to_chip(torch.ones(1000))
    second = device.allocate((1000,), torch.float32)
    device.copy(first, second)
    device.fence().wait(timeout_s=10.0)
    assert device.to_host(second).sum() == 1000


def test_a_captured_program_works_on_the_same_buffers_again(device):
    source = device.to_chip(torch.zeros(4))
    target = device.allocate((4,), torch.float32)
    program = device.capture(lambda: device.copy(source, target))
    for number in (3.0, 5.0):
        device.copy(torch.full((4,), number), source)
        program.replay()
        assert device.to_host(target).tolist() == [number] * 4


def test_what_is_captured_is_recorded_if_the_backend_says_so(backend, device):
    program = device.capture(lambda: None)
    assert isinstance(program, EagerProgram) != backend.capabilities.can_capture


def test_memory_info_is_within_the_chip(device):
    info = device.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes


@pytest.fixture
def limited_device(backend, device):  # noqa: ARG001 - restores the process at the end
    """A second handle with a limit of one million bytes."""
    config = BackendConfig(chip_indices=(0,), dtype="float32", memory_limit_bytes=1_000_000)
    runtime = open_runtime(backend, config)
    return runtime.acquire(1).granted[0]


def test_the_memory_limit_holds_for_all_live_tensors_together(limited_device):
    kept = limited_device.allocate((150_000,), torch.float32)
    view = kept[10:]
    del kept
    with pytest.raises(OutOfMemory, match=r"800000 bytes asked .* 600000 bytes are in use"):
        limited_device.allocate((200_000,), torch.float32)
    assert limited_device.memory_info().free_bytes <= 400_000
    del view
    gc.collect()
    assert limited_device.allocate((200_000,), torch.float32).numel() == 200_000


def test_the_memory_limit_counts_arenas_and_scratch(limited_device):
    arena = limited_device.allocate_arena(1024, 500, 100)
    limited_device.scratch.take(Lifetime.REQUEST, "state", (300_000,), torch.uint8, 0)
    with pytest.raises(OutOfMemory, match="bytes asked"):
        limited_device.allocate((300_000,), torch.uint8)
    arena.close()
    assert limited_device.allocate((300_000,), torch.uint8).numel() == 300_000
    limited_device.scratch.reclaim(Lifetime.MODEL)
    gc.collect()
    assert limited_device.allocate((600_000,), torch.uint8).numel() == 600_000


def test_more_than_the_machine_has_is_refused(device):
    with pytest.raises(OutOfMemory, match="bytes asked"):
        device.allocate((1 << 46,), torch.float32)
