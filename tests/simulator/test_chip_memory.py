"""Memory of a simulated chip: exact, fragmenting, poisoned, and strict about its use."""

import random
from itertools import pairwise

import pytest
import torch

from backends.errors import OutOfMemory, UnsupportedOperation
from backends.simulator.memory import ChipMemory, MemoryMisuse
from backends.simulator.poisoned_memory import POISON

MIB = 1 << 20


def is_poison(tensor):
    expected = torch.frombuffer(bytearray(POISON), dtype=torch.uint8)
    flat = tensor.contiguous().view(torch.uint8).flatten()
    return torch.equal(flat, expected.repeat(flat.numel() // 2))


def test_memory_ends_at_the_exact_byte():
    memory = ChipMemory(4096, 512)
    memory.allocate(4096 - 512)
    with pytest.raises(OutOfMemory, match=r"1024 bytes asked .513 before.*512 of 4096.*has 512"):
        memory.allocate(513)
    memory.allocate(512)
    assert memory.free == 0
    with pytest.raises(OutOfMemory, match="0 of 4096 bytes are free"):
        memory.allocate(1)


def test_free_memory_in_pieces_does_not_serve_a_large_request():
    """200 blocks leave every second one: half of the memory is free, and a tenth does not fit."""
    memory = ChipMemory(200 * 512, 512)
    blocks = [memory.allocate(512) for _ in range(200)]
    for block in blocks[::2]:
        memory.give_back(block)
    assert memory.free == 100 * 512
    with pytest.raises(OutOfMemory, match=f"{100 * 512} of {200 * 512} .*largest piece has 512"):
        memory.allocate(20 * 512)
    for block in blocks[1::2]:
        memory.give_back(block)
    assert memory.largest_piece == 200 * 512


def test_best_fit_spares_the_large_piece_and_first_fit_does_not():
    for policy, largest in (("best_fit", 8 * 512), ("first_fit", 6 * 512)):
        memory = ChipMemory(16 * 512, 512, policy)
        pieces = [memory.allocate(size * 512) for size in (8, 1, 2, 5)]
        memory.give_back(pieces[0])
        memory.give_back(pieces[2])
        memory.allocate(2 * 512)
        assert memory.largest_piece == largest


@pytest.mark.parametrize("policy", ["best_fit", "first_fit"])
def test_regions_never_overlap_and_all_memory_comes_back(policy):
    chance = random.Random(7)
    memory = ChipMemory(256 * 512, 512, policy)
    live = []
    for _ in range(2000):
        if live and chance.random() < 0.5:
            memory.give_back(live.pop(chance.randrange(len(live))))
            continue
        try:
            live.append(memory.allocate(chance.randrange(1, 20 * 512)))
        except OutOfMemory:
            memory.give_back(live.pop())
        spans = sorted((region.address, region.address + region.size) for region in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert memory.used == sum(region.size for region in live)
    for region in live:
        memory.give_back(region)
    assert memory.largest_piece == memory.capacity


def test_new_and_freed_memory_is_poison():
    memory = ChipMemory(MIB, 512)
    region = memory.allocate(64)
    view = region.view((16,), torch.float32)
    assert is_poison(view)
    assert view.isnan().all()
    view.fill_(1.0)
    memory.give_back(region)
    assert is_poison(view)


def test_poison_is_nan_or_far_out_of_range():
    memory = ChipMemory(MIB, 512)
    region = memory.allocate(512)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert region.view((8,), dtype).isnan().all()
    for dtype in (torch.int32, torch.int64):
        assert (region.view((8,), dtype) < -(1 << 20)).all()


def test_a_large_chip_takes_no_host_memory_until_it_is_written():
    def resident_bytes():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident_bytes()
    memory = ChipMemory(96 << 30, 512)
    region = memory.allocate(64 << 30)
    view = region.view((64 << 30,), torch.uint8)
    assert is_poison(view[:64])
    assert is_poison(view[-64:])
    assert resident_bytes() - before < 64 * MIB
    view[40 << 30 : (40 << 30) + 4] = 1
    memory.give_back(region)
    assert is_poison(view[40 << 30 : (40 << 30) + 4])


def test_freeing_twice_and_using_freed_memory_are_errors(new_chip):
    chip = new_chip()
    region = chip.allocate(64)
    view = region.view((16,), torch.float32)
    chip.free(region)
    with pytest.raises(MemoryMisuse, match="freed"):
        chip.free(region)
    with pytest.raises(MemoryMisuse, match="was freed"):
        chip.launch("fill", lambda: view.fill_(1), writes=[view])


def test_kernels_refuse_memory_of_the_host_and_of_other_chips(new_chip):
    chip, other = new_chip(), new_chip(index=1)
    for tensor in (torch.zeros(4), other.allocate_tensor((4,), torch.float32)):
        assert not chip.owns(tensor)
        with pytest.raises(MemoryMisuse, match="not in this chip's memory"):
            chip.launch("read", lambda: None, reads=[tensor])


def test_a_tensor_s_memory_comes_back_when_neither_host_nor_chip_uses_it(new_chip):
    chip = new_chip()
    total = chip.memory_info().free_bytes
    tensor = chip.allocate_tensor((4,), torch.float32)
    view = tensor[1:]
    chip.launch("fill", lambda view=view: view.fill_(1), writes=[view])
    del tensor, view
    assert chip.memory_info().free_bytes == total - 512
    chip.synchronize()
    assert chip.memory_info().free_bytes == total


def test_freeing_is_ordered_behind_the_work_that_uses_the_memory(new_chip):
    for is_ordered in (True, False):
        chip = new_chip(async_allocate=is_ordered)
        source, kept = chip.allocate(64), chip.allocate_tensor((16,), torch.float32)
        view = source.view((16,), torch.float32)
        side = chip.stream()
        chip.launch("fill", lambda v=view: v.fill_(2), writes=[view], stream=side, seconds=1.0)
        chip.launch("copy", lambda v=view, k=kept: k.copy_(v), reads=[view], writes=[kept],
                    stream=side)  # fmt: skip
        chip.free(source)
        with pytest.raises(MemoryMisuse, match="was freed"):
            chip.launch("late", lambda: None, reads=[view])
        waited = chip.clock.now_s >= 1.0
        assert waited != is_ordered
        chip.synchronize()
        assert (kept == 2).all()
        assert is_poison(view)


def test_running_out_of_memory_waits_for_what_pending_work_gives_back(new_chip):
    chip = new_chip(memory_bytes=4096)
    tensor = chip.allocate_tensor((1024,), torch.float32)
    chip.launch("fill", lambda tensor=tensor: tensor.fill_(1), writes=[tensor])
    del tensor
    chip.allocate(4096)
    with pytest.raises(OutOfMemory, match="0 of 4096"):
        chip.allocate(1)


def test_deferred_out_of_memory_shows_at_the_next_synchronization(new_chip):
    chip = new_chip(memory_bytes=4096, deferred_out_of_memory=True)
    region = chip.allocate(8192)
    view = region.view((8,), torch.float32)
    chip.launch("fill", lambda: view.fill_(1), writes=[view])
    with pytest.raises(OutOfMemory, match="8192 bytes asked"):
        chip.synchronize()
    chip.free(region)
    assert chip.memory_info().free_bytes == 4096
    chip.synchronize()


def test_hidden_workspaces_grow_with_shapes_until_they_are_released(new_chip):
    chip = new_chip(workspace_per_shape=True, workspace_bytes=1024)
    buffer = chip.allocate_tensor((64,), torch.float32)
    free = chip.memory_info().free_bytes
    for length in (1, 2, 3, 2, 1):
        view = buffer[:length]
        chip.launch("attention", lambda view=view: view.fill_(0), writes=[view])
    chip.launch("linear", lambda: buffer.fill_(0), writes=[buffer])
    chip.synchronize()
    assert free - chip.memory_info().free_bytes == 4 * 1024
    assert chip.workspaces.bytes_by_operation() == {"attention": 3072, "linear": 1024}
    chip.release_workspaces("attention")
    assert free - chip.memory_info().free_bytes == 1024
    chip.release_workspaces()
    assert chip.memory_info().free_bytes == free


def test_a_leak_is_planted_in_one_operation(new_chip):
    chip = new_chip(faults="leak@rotary", workspace_bytes=1024)
    buffer = chip.allocate_tensor((64,), torch.float32)
    for name in ("rotary", "linear"):
        chip.launch(name, lambda: None, reads=[buffer])
    assert chip.workspaces.bytes_by_operation() == {"rotary": 1024}


def test_float64_is_refused_where_the_chip_has_none(new_chip):
    assert new_chip().allocate_tensor((0, 3), torch.float64).shape == (0, 3)
    with pytest.raises(UnsupportedOperation, match="use float32"):
        new_chip(has_float64=False).allocate_tensor((1,), torch.float64)
