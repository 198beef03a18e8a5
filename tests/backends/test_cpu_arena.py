"""KV memory of the cpu backend: segments really go back to the system and count for the limit."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from backends.cpu.device import CpuDevice
from backends.cpu.host import CpuChip
from backends.errors import OutOfMemory

MIB = 1 << 20
PAGE_BYTES = mmap.PAGESIZE


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.fixture
def open_device():
    """Opens a chip of the cores this process has, with a limit."""
    cores, threads = tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads()
    yield lambda limit_bytes: CpuDevice(CpuChip(0, "cores", cores=cores), limit_bytes)
    torch.set_num_threads(threads)


def test_a_released_segments_pages_go_back_to_the_system(open_device):
    arena = open_device(None).allocate_arena(MIB, 64, 16)
    arena.bytes.fill_(7)
    full = resident_bytes()
    arena.release_segment(3)
    arena.release_segment(1)
    assert full - resident_bytes() > 30 * MIB
    assert (arena.bytes[:16] == 7).all()
    assert (arena.bytes[32:48] == 7).all()
    arena.restore_segment(1)
    arena.bytes[16:32].fill_(9)
    assert full - resident_bytes() < 20 * MIB
    arena.close()
    assert full - resident_bytes() > 40 * MIB


def test_pages_shared_with_a_neighbour_stay(open_device):
    """Segments of one and a half pages: only the whole pages inside can go."""
    block_bytes = 3 * PAGE_BYTES // 2
    arena = open_device(None).allocate_arena(block_bytes, 4, 1)
    arena.bytes.fill_(7)
    arena.release_segment(1)
    assert (arena.bytes[[0, 2, 3]] == 7).all()
    assert (arena.bytes[1, PAGE_BYTES // 2 :] == 0).all()
    arena.close()


def test_the_limit_counts_what_the_arena_holds(open_device):
    device = open_device(10 * MIB)
    arena = device.allocate_arena(MIB, 8, 2)
    with pytest.raises(OutOfMemory, match=rf"{3 * MIB} bytes asked .* {2 * MIB} bytes are free"):
        device.allocate((3 * MIB,), torch.uint8)
    with pytest.raises(OutOfMemory, match="an arena of 3 blocks"):
        device.allocate_arena(MIB, 3, 1)
    arena.release_segment(0)
    taken = device.allocate((3 * MIB,), torch.uint8)
    with pytest.raises(OutOfMemory, match=f"{2 * MIB} bytes asked"):
        arena.restore_segment(0)
    del taken
    arena.restore_segment(0)
    assert device.memory_info().free_bytes <= 2 * MIB
    arena.close()
    assert device.allocate((10 * MIB,), torch.uint8).numel() == 10 * MIB
