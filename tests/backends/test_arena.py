"""The memory of KV blocks: equal pieces at fixed addresses, in segments."""

import pytest
import torch

from backends.errors import OutOfMemory, UnsupportedOperation

BLOCK_BYTES, BLOCKS, SEGMENT_BLOCKS = 4096, 21, 8


@pytest.fixture
def arena(device):
    opened = device.allocate_arena(BLOCK_BYTES, BLOCKS, SEGMENT_BLOCKS)
    yield opened
    opened.close()


def fill(device, arena, block):
    device.copy(torch.full((BLOCK_BYTES,), block + 1, dtype=torch.uint8), arena.bytes[block])


def test_every_block_is_a_piece_of_its_own(device, arena):
    assert arena.bytes.dtype == torch.uint8
    assert arena.bytes.shape == (BLOCKS, BLOCK_BYTES)
    assert arena.bytes.is_contiguous()
    for block in range(BLOCKS):
        fill(device, arena, block)
    found = device.to_host(arena.bytes)
    assert (found == torch.arange(1, BLOCKS + 1)[:, None]).all()


def test_segments_are_whole_blocks_and_cover_all(arena):
    assert arena.segments == 3
    ranges = [arena.segment_range(segment) for segment in range(3)]
    assert ranges == [range(8), range(8, 16), range(16, 21)]
    assert [arena.segment_of(block) for block in (0, 7, 8, 20)] == [0, 0, 1, 2]
    for outside in (-1, 3):
        with pytest.raises(AssertionError, match="segment"):
            arena.segment_range(outside)
    with pytest.raises(AssertionError, match="block 21 of 21"):
        arena.segment_of(BLOCKS)


def test_a_segment_goes_and_comes_back_while_the_others_keep_their_contents(device, arena):
    for block in range(BLOCKS):
        fill(device, arena, block)
    device.synchronize()
    address = arena.bytes.data_ptr()
    try:
        arena.release_segment(1)
    except UnsupportedOperation:
        assert arena.held_bytes == BLOCKS * BLOCK_BYTES
        with pytest.raises(UnsupportedOperation):
            arena.restore_segment(1)
        return
    assert arena.held_bytes == (BLOCKS - SEGMENT_BLOCKS) * BLOCK_BYTES
    with pytest.raises(AssertionError):
        arena.release_segment(1)
    arena.restore_segment(1)
    with pytest.raises(AssertionError):
        arena.restore_segment(1)
    assert arena.held_bytes == BLOCKS * BLOCK_BYTES
    assert arena.bytes.data_ptr() == address
    for block in range(8, 16):
        fill(device, arena, block)
    found = device.to_host(arena.bytes)
    assert (found == torch.arange(1, BLOCKS + 1)[:, None]).all()


def test_a_closed_arena_is_not_used(device):
    arena = device.allocate_arena(BLOCK_BYTES, 2, 1)
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = arena.bytes


def test_an_arena_that_does_not_fit_says_what_was_asked(device):
    with pytest.raises(OutOfMemory, match=rf"{1 << 46} bytes asked"):
        device.allocate_arena(1 << 20, 1 << 26, 64)
