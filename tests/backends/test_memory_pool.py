"""Block memory of a backend: logical ids keep their contents wherever the blocks are.

Keys and values are written and read by the backend's own kernels, through the contracts only.
"""

import pytest
import torch

from backends.errors import OutOfMemory, UnsupportedOperation
from backends.interface import BatchRows, BoundKV, KVLayout, KVSpec, MemoryPool
from tests.backends.mirrored_pool import MirroredPool

CAPACITY = 9
LAYERS, HEADS, HEAD_SIZE = 2, 2, 16

pytestmark = [
    pytest.mark.covers("write_kv", dtype="float32"),
    pytest.mark.covers("attention", dtype="float32"),
]


@pytest.fixture
def spec(backend):
    return KVSpec(
        layers=LAYERS,
        kv_heads=HEADS,
        head_size=HEAD_SIZE,
        block_tokens=4 * backend.capabilities.block_tokens_multiple,
        dtype=torch.float32,
    )


class NumberedBlocks:
    """A pool whose block b holds the number b + 1 in every value, plus a tenth of the layer."""

    def __init__(self, runtime, device, spec, call):
        self.pool = runtime.create_memory_pool(device, spec, CAPACITY)
        self.spec = spec
        self._kernel = {"layout": runtime.kv_layout(spec).order}
        self._call = call
        for block in range(CAPACITY):
            self.write(block, float(block + 1))

    def _bind(self, block):
        return self.pool.bind(BatchRows((0, self.spec.block_tokens), (0,), ((block,),)))

    def write(self, block, number):
        for layer in range(LAYERS):
            key = torch.full((self.spec.block_tokens, HEADS, HEAD_SIZE), number + layer / 10)
            self._call("write_kv", self._bind(block), layer, key, key, **self._kernel)

    def check(self, block, number):
        """Attention over equal values is the value."""
        query = torch.zeros(self.spec.block_tokens, HEADS, HEAD_SIZE)
        for layer in range(LAYERS):
            found = self._call(
                "attention", self._bind(block), layer, query, (0, 1), 1.0, 0, 0.0, **self._kernel
            )
            expected = number + (layer / 10 if number else 0)
            torch.testing.assert_close(found, torch.full_like(found, expected))

    def check_all(self):
        for block in range(CAPACITY):
            self.check(block, block + 1)


@pytest.fixture
def blocks(runtime, device, spec, call):
    opened = NumberedBlocks(runtime, device, spec, call)
    yield opened
    opened.pool.close()


def test_blocks_hold_what_was_written_to_them(blocks):
    blocks.check_all()


def test_a_moved_block_is_the_same_block_for_those_above(blocks):
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        block, physical = torch.randint(0, CAPACITY, (2,), generator=generator).tolist()
        blocks.pool.move_block(block, physical)
    blocks.check_all()


def test_copy_and_zero_follow_the_mapping(blocks):
    blocks.pool.move_block(2, 7)
    blocks.pool.copy_block(2, 5)
    blocks.pool.zero_blocks([0, 7])
    expected = {0: 0, 1: 2, 2: 3, 3: 4, 4: 5, 5: 3, 6: 7, 7: 0, 8: 9}
    for block, number in expected.items():
        blocks.check(block, number)


def test_writes_after_a_move_land_in_the_moved_block(blocks):
    blocks.pool.move_block(4, 1)
    blocks.write(4, 70.0)
    blocks.write(1, 80.0)
    for block in range(CAPACITY):
        blocks.check(block, {4: 70.0, 1: 80.0}.get(block, block + 1))


class Load:
    """Requests that grow, share, end and come again, beside a pool that never moves a block."""

    def __init__(self, runtime, device, spec, call, seed):
        self.mirrored = MirroredPool(runtime, device, spec, 40, call)
        self.pool = self.mirrored.pool
        self.generator = torch.Generator().manual_seed(seed)
        self.requests = {}
        self.free = list(range(40))
        self.next_name = 0

    def number(self, low, high):
        return int(torch.randint(low, high, (), generator=self.generator))

    def step(self):
        """Every request grows by a chunk, all in one step; then each attends over its context."""
        block_tokens = self.mirrored.spec.block_tokens
        rows = []
        for tokens in self.requests.values():
            count = self.number(1, block_tokens + 2)
            wanted = -(-(tokens["length"] + count) // block_tokens) - len(tokens["blocks"])
            if wanted > len(self.free):
                continue
            fresh = [self.free.pop(self.number(0, len(self.free))) for _ in range(wanted)]
            self.pool.retain(fresh)
            tokens["blocks"] += fresh
            rows.append((tokens["length"], count, tuple(tokens["blocks"])))
            tokens["length"] += count
        if rows:
            self._compute(rows)

    def _compute(self, rows):
        starts = [0]
        for _, count, _ in rows:
            starts.append(starts[-1] + count)
        batch = BatchRows(
            tuple(starts), tuple(row[0] for row in rows), tuple(row[2] for row in rows)
        )
        for layer in range(LAYERS):
            keys = self.mirrored.keys_and_values(starts[-1], self.generator)
            self.mirrored.write(batch, layer, *keys)
            query = torch.randn(starts[-1], 2 * HEADS, HEAD_SIZE, generator=self.generator)
            actual, expected = self.mirrored.attend(batch, layer, query, (0, 0, 1, 1), 0.25)
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)

    def admit(self):
        """With the blocks of another request that are full already, half of the time."""
        self.next_name += 1
        request = {"length": 0, "blocks": []}
        if self.requests and self.number(0, 2):
            other = list(self.requests.values())[self.number(0, len(self.requests))]
            full = other["length"] // self.mirrored.spec.block_tokens
            request["blocks"] = other["blocks"][:full]
            request["length"] = full * self.mirrored.spec.block_tokens
            self.pool.retain(request["blocks"])
        self.requests[self.next_name] = request

    def end(self):
        """The contents of what nobody holds any more are given up."""
        ended = self.requests.pop(list(self.requests)[self.number(0, len(self.requests))])
        self.pool.release(ended["blocks"])
        gone = [block for block in ended["blocks"] if not self.pool.references(block)]
        self.pool.discard(gone)
        self.free += gone

    def move(self):
        self.pool.move_block(self.number(0, 40), self.number(0, 40))


@pytest.mark.parametrize("seed", [1, 2])
def test_moving_and_compacting_under_load_changes_no_output(runtime, device, spec, call, seed):
    load = Load(runtime, device, spec, call, seed)
    load.admit()
    moved = 0
    for turn in range(24):
        event = load.number(0, 4)
        if event == 0 and len(load.requests) < 5:
            load.admit()
        elif event == 1 and len(load.requests) > 1:
            load.end()
        load.move()
        if turn % 3 == 2:
            moved += load.pool.compact()
            load.pool.trim()
        load.step()
    assert moved > 0
    while load.requests:
        load.end()
    assert load.pool.referenced_count == 0
    load.mirrored.close()


@pytest.mark.parametrize("head_size", [1, 12, 64])
def test_blocks_are_padded_as_the_layout_says(runtime, backend, head_size, dtype):
    tokens = 16 * backend.capabilities.block_tokens_multiple
    spec = KVSpec(layers=2, kv_heads=3, head_size=head_size, block_tokens=tokens, dtype=dtype)
    layout = runtime.kv_layout(spec)
    assert layout.alignment_bytes % 512 == 0
    assert layout.block_bytes % layout.alignment_bytes == 0
    assert layout.block_bytes >= 2 * 2 * tokens * 3 * head_size * dtype.itemsize


@pytest.mark.parametrize("block", [-1, CAPACITY])
def test_a_block_outside_the_pool_is_never_touched(runtime, device, spec, block):
    pool = runtime.create_memory_pool(device, spec, CAPACITY)
    for ask in (
        lambda: pool.bind(BatchRows((0, 1), (0,), ((block,),))),
        lambda: pool.copy_block(0, block),
        lambda: pool.zero_blocks([block]),
        lambda: pool.move_block(0, block),
        lambda: pool.move_block(block, 0),
        lambda: pool.retain([block]),
        lambda: pool.release([block]),
        lambda: pool.references(block),
    ):
        with pytest.raises(AssertionError, match="block"):
            ask()
    pool.close()


def test_references_follow_those_who_hold_a_block(runtime, device, spec):
    pool = runtime.create_memory_pool(device, spec, CAPACITY)
    pool.retain([3, 5])
    pool.retain([3])
    assert [pool.references(block) for block in (3, 4, 5)] == [2, 0, 1]
    assert (pool.referenced_count, pool.free_count) == (2, CAPACITY - 2)
    pool.release([3, 5])
    assert [pool.references(block) for block in (3, 5)] == [1, 0]
    # What was in block 5 may be cached above: it is not given to anyone else.
    assert pool.free_count == CAPACITY - 2
    pool.discard([5])
    assert pool.free_count == CAPACITY - 1
    with pytest.raises(AssertionError, match="block 5 is released, but nobody holds it"):
        pool.release([5])
    with pytest.raises(AssertionError, match="block 3 is discarded, but somebody holds it"):
        pool.discard([3])
    pool.close()


def test_blocks_for_the_workers_own_use_are_idle_ones_and_come_back(runtime, device, spec):
    pool = runtime.create_memory_pool(device, spec, CAPACITY)
    pool.retain([0, 2])
    own = pool.allocate(3)
    assert len(set(own)) == 3
    assert not {0, 2} & set(own)
    assert [pool.references(block) for block in own] == [1, 1, 1]
    pool.bind(BatchRows((0, 1), (0,), (own,)))
    pool.release(own)
    assert pool.free_count == CAPACITY - 2
    assert pool.allocate(0) == []
    pool.close()


def test_beyond_the_quota_nothing_is_given_and_nothing_changes(runtime, device, spec):
    pool = runtime.create_memory_pool(device, spec, CAPACITY)
    pool.quota = 4
    pool.retain([8])
    assert pool.free_count == 3
    with pytest.raises(OutOfMemory, match=r"4 KV blocks asked; of 9 blocks with a quota of 4, 1"):
        pool.allocate(4)
    with pytest.raises(OutOfMemory, match=r"quota of 4"):
        pool.retain([0, 1, 2, 3])
    assert pool.referenced_count == 1
    pool.retain([0, 1, 2])
    pool.retain([0, 1, 2, 8])
    assert (pool.referenced_count, pool.free_count) == (4, 0)
    pool.quota = CAPACITY
    assert len(pool.allocate(5)) == 5
    pool.close()


def test_a_pool_that_does_not_fit_says_what_was_asked(runtime, device, spec):
    capacity = 1 << 32
    block_bytes = runtime.kv_layout(spec).block_bytes
    with pytest.raises(OutOfMemory, match=rf"{capacity} KV blocks of {block_bytes} bytes"):
        runtime.create_memory_pool(device, spec, capacity)


def test_a_pool_that_only_binds_refuses_the_rest_by_name(spec):
    class SmallestPool(MemoryPool):
        def bind(self, _rows):
            return BoundKV()

    pool = SmallestPool(spec, KVLayout("own", 1024, 1), CAPACITY)
    for ask in (
        lambda: pool.copy_block(0, 1),
        lambda: pool.zero_blocks([0]),
        lambda: pool.move_block(0, 1),
        pool.compact,
    ):
        with pytest.raises(UnsupportedOperation, match="this memory pool cannot"):
            ask()
    assert (pool.trim(), pool.held_bytes) == (0, CAPACITY * 1024)
    assert pool.allocate(2) == [0, 1]
    pool.close()
