"""The default memory pool itself: places, copies and segments, on a device of counted copies."""

import time

import pytest
import torch

from backends.arena import WholeArena
from backends.errors import OutOfMemory
from backends.interface import BatchRows, KVSpec
from backends.paged_pool import PagedMemoryPool, paged_layout
from backends.plugin import ChipDescription
from kernels.reference import attention, write_kv
from tests.backends.mirrored_pool import MainMemory, shuffled_rows

SPEC = KVSpec(layers=3, kv_heads=2, head_size=12, block_tokens=4, dtype=torch.float32)
BLOCK_BYTES = 2560
CAPACITY, SEGMENT_BLOCKS = 32, 8


class SegmentedArena(WholeArena):
    """Poisons what is given back; may refuse to take it again."""

    def __init__(self, memory, segment_blocks):
        super().__init__(memory, segment_blocks)
        self.released = set()
        self.refuses = False

    @property
    def held_bytes(self):
        return (self.segments - len(self.released)) * self.segment_blocks * self.block_bytes

    def release_segment(self, segment):
        self.released.add(segment)
        blocks = self.segment_range(segment)
        self.bytes[blocks.start : blocks.stop] = 0xFF

    def restore_segment(self, segment):
        if self.refuses:
            raise OutOfMemory("no room")
        self.released.remove(segment)


class CountingDevice(MainMemory):
    """Counts copies; its arenas have segments unless told otherwise."""

    def __init__(self, segmented=True):
        super().__init__(ChipDescription(0, "main memory", 1 << 30))
        self.copies = []
        self.segmented = segmented

    def copy(self, source, target):
        assert source.is_contiguous()
        assert target.is_contiguous()
        self.copies.append(target.numel() * target.itemsize)
        super().copy(source, target)

    def allocate_arena(self, block_bytes, blocks, segment_blocks):
        kind = SegmentedArena if self.segmented else WholeArena
        self.arena = kind(self.allocate((blocks, block_bytes), torch.uint8), segment_blocks)
        return self.arena


@pytest.fixture
def device():
    return CountingDevice()


@pytest.fixture
def pool(device):
    layout = paged_layout(SPEC, 512)
    return PagedMemoryPool(device, SPEC, layout, CAPACITY, SEGMENT_BLOCKS * BLOCK_BYTES)


def bind(pool, block):
    return pool.bind(BatchRows((0, SPEC.block_tokens), (0,), ((block,),)))


def write(pool, block):
    number = torch.full((SPEC.block_tokens, SPEC.kv_heads, SPEC.head_size), block + 1.0)
    for layer in range(SPEC.layers):
        write_kv(bind(pool, block), layer, number, -number)


def check(pool, block):
    cache = bind(pool, block)
    place = int(cache.block_tables)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert (keys[place] == block + 1).all()
        assert (values[place] == -block - 1).all()


def places(pool, blocks):
    tables = pool.bind(BatchRows((0, 1), (0,), (tuple(blocks),))).block_tables
    return tables[0].tolist()


def hold(pool, blocks):
    pool.retain(blocks)
    for block in blocks:
        write(pool, block)


def test_a_block_is_one_piece_of_padded_bytes(pool, device):
    assert pool.layout.block_bytes == BLOCK_BYTES
    cache = bind(pool, 0)
    base = device.arena.bytes.data_ptr()
    assert [cache.keys[0][block].data_ptr() - base for block in range(CAPACITY)] == [
        block * BLOCK_BYTES for block in range(CAPACITY)
    ]
    parts = [part for pair in zip(cache.keys, cache.values, strict=True) for part in pair]
    assert [part.data_ptr() - base for part in parts] == [index * 384 for index in range(6)]
    assert all(part[0].is_contiguous() for part in parts)


def test_copy_zero_and_move_are_single_copies_of_a_block(pool, device):
    hold(pool, range(4))
    device.copies.clear()
    pool.copy_block(0, 9)
    pool.move_block(1, 20)
    assert device.copies == [BLOCK_BYTES] * 2
    pool.zero_blocks([2])
    device.copies.clear()
    pool.zero_blocks([3, 9])
    assert device.copies == [BLOCK_BYTES] * 2
    pool.move_block(0, 20)
    assert device.copies == [BLOCK_BYTES] * 5
    assert places(pool, [0, 1]) == [20, 0]
    check(pool, 0)
    check(pool, 1)


def test_writes_land_at_the_tokens_positions(pool):
    """Two rows: one goes on inside its second block, one starts and spills into a second."""
    rows = BatchRows((0, 2, 7), (5, 0), ((3, 6), (1, 8)))
    key = torch.arange(1, 8.0)[:, None, None].expand(7, SPEC.kv_heads, SPEC.head_size)
    for block in (1, 3, 6, 8):
        write(pool, block)
    write_kv(pool.bind(rows), 0, key, key)
    values = pool.bind(rows).values[0][:, :, 0, 0]
    assert values[6].tolist() == [-7.0, 1.0, 2.0, -7.0]
    assert values[1].tolist() == [3.0, 4.0, 5.0, 6.0]
    assert values[8].tolist() == [7.0, -9.0, -9.0, -9.0]


def test_a_table_may_begin_behind_the_window(pool):
    """Two rows: the first holds what is from position 8 on, in two blocks, the second all."""
    rows = BatchRows((0, 2, 4), (11, 3), ((3, 6), (1, 8)), (8, 0))
    for block in (1, 3, 6, 8):
        write(pool, block)
    key = torch.arange(1, 5.0)[:, None, None].expand(4, SPEC.kv_heads, SPEC.head_size)
    bound = pool.bind(rows)
    write_kv(bound, 0, key, key)
    values = bound.values[0][:, :, 0, 0]
    assert values[3].tolist() == [-4.0, -4.0, -4.0, 1.0]
    assert values[6].tolist() == [2.0, -7.0, -7.0, -7.0]
    assert values[1].tolist() == [-2.0, -2.0, -2.0, 3.0]
    assert values[8].tolist() == [4.0, -9.0, -9.0, -9.0]
    assert bound.table_starts == (8, 0)
    assert pool.bind(BatchRows((0, 1), (0,), ((3,),))).table_starts == (0,)


def test_a_row_before_its_first_block_is_refused(pool):
    with pytest.raises(AssertionError, match="a row begins before its first block"):
        pool.bind(BatchRows((0, 1), (7,), ((3,),), (8,)))


@pytest.mark.parametrize("seed", range(10))
def test_tables_that_lost_their_front_write_and_read_as_whole_ones(seed):
    """The same tokens with the blocks behind the window and without them, in one arena each."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 40, (6,), generator=generator).tolist()
    batch = [(numbers[0], 3), (numbers[1], 1), (numbers[2] + 50, 5), (numbers[3], 1)]
    window = 1 + numbers[4]
    spec = KVSpec(layers=1, kv_heads=1, head_size=4, block_tokens=4, dtype=torch.float32)
    query = torch.randn(10, 1, 4, generator=generator)
    key, value = (torch.randn(10, 1, 4, generator=generator) for _ in range(2))
    context = torch.randn(2, 100, 1, 4, generator=generator)
    found = []
    for held in (window, 0):
        rows, blocks = shuffled_rows(batch, 4, generator, held)
        assert held == 0 or max(rows.table_starts) > 0
        pool = PagedMemoryPool(CountingDevice(), spec, paged_layout(spec, 512), blocks)
        pool.bind(BatchRows((0, 1), (0,), ((0,),))).keys[0].fill_(float("nan"))
        for row, (count, _) in enumerate(batch):
            start = rows.table_starts[row]
            before = BatchRows((0, count - start), (start,), (rows.block_tables[row],), (start,))
            write_kv(pool.bind(before), 0, context[0, start:count], context[1, start:count])
        bound = pool.bind(rows)
        write_kv(bound, 0, key, value)
        found.append(attention(bound, 0, query, (0,), 0.5, window, 0.0))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_compaction_fills_the_lowest_places_with_as_few_copies_as_there_are_holes(pool, device):
    held = [0, 3, 4, 17, 30, 31]
    hold(pool, held)
    device.copies.clear()
    assert pool.compact() == 3
    assert device.copies == [BLOCK_BYTES] * 3
    assert sorted(places(pool, held)) == list(range(6))
    assert places(pool, [0, 3, 4]) == [0, 3, 4]
    for block in held:
        check(pool, block)
    assert pool.compact() == 0


def test_what_may_be_cached_above_moves_too_and_what_is_given_up_does_not(pool):
    hold(pool, [10, 20, 30])
    pool.release([20, 30])
    pool.discard([30])
    assert pool.compact() == 2
    assert sorted(places(pool, [10, 20])) == [0, 1]
    check(pool, 20)


def test_empty_segments_go_back_and_their_blocks_find_other_places(pool, device):
    hold(pool, [0, 9, 18, 27])
    assert pool.trim() == 0
    pool.compact()
    assert pool.trim() == 3 * SEGMENT_BLOCKS * BLOCK_BYTES
    assert pool.held_bytes == SEGMENT_BLOCKS * BLOCK_BYTES
    assert device.arena.released == {1, 2, 3}
    # Any logical block may be given next; there is room in the segment that is left.
    hold(pool, [31, 22, 13, 12])
    assert device.arena.released == {1, 2, 3}
    hold(pool, [11])
    assert len(device.arena.released) == 2
    for block in (0, 9, 18, 27, 31, 22, 13, 12, 11):
        check(pool, block)


def test_every_block_can_be_used_again_after_a_trim(pool, device):
    pool.trim()
    assert pool.held_bytes == 0
    hold(pool, range(CAPACITY))
    assert device.arena.released == set()
    for block in range(CAPACITY):
        check(pool, block)
    assert sorted(places(pool, range(CAPACITY))) == list(range(CAPACITY))


def test_a_segment_that_cannot_be_taken_again_leaves_the_references_as_they_were(pool, device):
    pool.trim()
    device.arena.refuses = True
    with pytest.raises(OutOfMemory, match="no room"):
        pool.retain([4, 5])
    assert (pool.references(4), pool.referenced_count, pool.free_count) == (0, 0, CAPACITY)
    device.arena.refuses = False
    hold(pool, [4, 5])
    check(pool, 4)


def test_a_block_moves_into_a_segment_that_was_given_back(pool, device):
    hold(pool, [0])
    pool.trim()
    pool.move_block(0, 25)
    assert 3 not in device.arena.released
    check(pool, 0)


def test_moving_an_idle_block_copies_at_most_what_it_displaces(pool, device):
    hold(pool, [0])
    device.copies.clear()
    pool.move_block(5, 9)
    assert device.copies == []
    pool.move_block(7, 0)
    assert device.copies == [BLOCK_BYTES]
    assert pool.free_count == CAPACITY - 1
    check(pool, 0)
    assert places(pool, [0, 7]) == [7, 0]


def test_an_arena_of_one_piece_gives_back_nothing_and_goes_on():
    device = CountingDevice(segmented=False)
    pool = PagedMemoryPool(device, SPEC, paged_layout(SPEC, 512), CAPACITY)
    hold(pool, [30])
    pool.compact()
    assert pool.trim() == 0
    check(pool, 30)


def test_a_closed_pool_binds_nothing(pool):
    pool.close()
    with pytest.raises(AssertionError, match="closed"):
        bind(pool, 0)


def test_a_large_step_is_bound_in_little_time():
    small = KVSpec(layers=1, kv_heads=1, head_size=8, block_tokens=16, dtype=torch.float32)
    pool = PagedMemoryPool(CountingDevice(), small, paged_layout(small, 512), 64 * 500)
    tables = tuple(list(range(row * 500, row * 500 + 500)) for row in range(64))
    rows = BatchRows(tuple(range(65)), (7999,) * 64, tables)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        pool.bind(rows)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.02
