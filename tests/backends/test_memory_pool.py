"""Block memory of a backend: logical ids keep their contents wherever the blocks are."""

import time

import pytest
import torch

from backends.errors import OutOfMemory, UnsupportedOperation
from backends.interface import BatchRows, BoundKV, KVLayout, KVSpec, MemoryPool
from kernels.reference import REFERENCE_IMPLEMENTATIONS

SPEC = KVSpec(layers=3, kv_heads=2, head_size=12, block_tokens=4, dtype=torch.float32)
CAPACITY = 9
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}


@pytest.fixture
def pool(runtime, device):
    opened = runtime.create_memory_pool(device, SPEC, CAPACITY)
    for block in range(CAPACITY):
        write(opened, block, float(block + 1))
    yield opened
    opened.close()


def rows_of(block):
    return BatchRows((0, SPEC.block_tokens), (0,), ((block,),))


def write(pool, block, number):
    shape = (SPEC.block_tokens, SPEC.kv_heads, SPEC.head_size)
    for layer in range(SPEC.layers):
        key = torch.full(shape, number + layer / 10)
        REFERENCE["write_kv"](pool.bind(rows_of(block)), layer, key, -key)


def contents(pool, block):
    """Attention of each token of a block, over equal values: the value written there."""
    heads = tuple(range(SPEC.kv_heads))
    query = torch.zeros(SPEC.block_tokens, SPEC.kv_heads, SPEC.head_size)
    read = [
        REFERENCE["attention"](pool.bind(rows_of(block)), layer, query, heads, 1.0)
        for layer in range(SPEC.layers)
    ]
    return -torch.stack(read)


def check_contents(pool, block, number):
    found = contents(pool, block)
    for layer in range(SPEC.layers):
        expected = number + (layer / 10 if number else 0)
        torch.testing.assert_close(found[layer], torch.full_like(found[layer], expected))


def test_blocks_hold_what_was_written_to_them(pool):
    for block in range(CAPACITY):
        check_contents(pool, block, block + 1)


def test_a_moved_block_is_the_same_block_for_those_above(pool):
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        block, physical = torch.randint(0, CAPACITY, (2,), generator=generator).tolist()
        pool.move_block(block, physical)
        assert pool.bind(rows_of(block)).block_tables.tolist() == [[physical]]
    for block in range(CAPACITY):
        check_contents(pool, block, block + 1)
    places = {pool.bind(rows_of(block)).block_tables.item() for block in range(CAPACITY)}
    assert places == set(range(CAPACITY))


def test_copy_and_zero_follow_the_mapping(pool):
    pool.move_block(2, 7)
    pool.copy_block(2, 5)
    pool.zero_blocks([0, 7])
    expected = {0: 0, 1: 2, 2: 3, 3: 4, 4: 5, 5: 3, 6: 7, 7: 0, 8: 9}
    for block, number in expected.items():
        check_contents(pool, block, number)


def test_writes_land_at_the_tokens_positions(pool):
    """Two rows: one goes on inside its second block, one starts and spills into a second."""
    rows = BatchRows((0, 2, 7), (5, 0), ((3, 6), (1, 8)))
    key = torch.arange(7.0)[:, None, None].expand(7, SPEC.kv_heads, SPEC.head_size)
    REFERENCE["write_kv"](pool.bind(rows), 0, key, key)
    arena = pool.bind(rows).values[0]
    assert arena[:, :, 0, 0][6].tolist() == [-7.0, 0.0, 1.0, -7.0]
    assert arena[:, :, 0, 0][1].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert arena[:, :, 0, 0][8].tolist() == [6.0, -9.0, -9.0, -9.0]


@pytest.mark.parametrize("head_size", [1, 12, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_aligned_as_the_layout_says(runtime, device, head_size, dtype):
    spec = KVSpec(layers=2, kv_heads=3, head_size=head_size, block_tokens=16, dtype=dtype)
    layout = runtime.kv_layout(spec)
    assert layout.block_bytes % layout.alignment_bytes == 0
    assert layout.block_bytes >= 2 * 2 * 16 * 3 * head_size * dtype.itemsize
    cache = runtime.create_memory_pool(device, spec, 5).bind(BatchRows((0, 1), (0,), ((0,),)))
    starts = {
        tensor[layer, block].data_ptr() - cache.keys.data_ptr()
        for tensor in (cache.keys, cache.values)
        for layer in range(2)
        for block in range(5)
    }
    assert len(starts) == 20
    assert all(start % layout.alignment_bytes == 0 for start in starts)


@pytest.mark.parametrize("block", [-1, CAPACITY])
def test_a_block_outside_the_pool_is_never_touched(pool, block):
    with pytest.raises(AssertionError, match="block"):
        pool.bind(rows_of(block))
    with pytest.raises(AssertionError, match="block"):
        pool.copy_block(0, block)
    with pytest.raises(AssertionError, match="block"):
        pool.move_block(0, block)


def test_a_pool_that_does_not_fit_says_what_was_asked(runtime, device):
    capacity = 1 << 32
    block_bytes = runtime.kv_layout(SPEC).block_bytes
    with pytest.raises(OutOfMemory, match=rf"{capacity} KV blocks of {block_bytes} bytes"):
        runtime.create_memory_pool(device, SPEC, capacity)


def test_a_large_step_is_bound_in_little_time(runtime, device):
    small = KVSpec(layers=1, kv_heads=1, head_size=8, block_tokens=16, dtype=torch.float32)
    pool = runtime.create_memory_pool(device, small, 64 * 500)
    tables = tuple(list(range(row * 500, row * 500 + 500)) for row in range(64))
    rows = BatchRows(tuple(range(65)), (7999,) * 64, tables)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        pool.bind(rows)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.02


def test_a_pool_that_only_binds_refuses_the_rest_by_name():
    class SmallestPool(MemoryPool):
        def bind(self, _rows):
            return BoundKV()

    pool = SmallestPool(SPEC, KVLayout("own", 1024, 1), CAPACITY)
    for ask in (
        lambda: pool.copy_block(0, 1),
        lambda: pool.zero_blocks([0]),
        lambda: pool.move_block(0, 1),
    ):
        with pytest.raises(UnsupportedOperation, match="this memory pool cannot"):
            ask()
    pool.close()
