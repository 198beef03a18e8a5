"""The default memory pool: a block-major arena on a device, with a logical to physical map.

logical   0  1  2  3  4  5
          │  └──┐└──────┐└ ...
physical  0  1  2  3  4  5  6  7     places in the arena, each one contiguous piece of bytes
         [  segment 0 ][ segment 1 ] given back and taken again as a whole
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from backends.device import Device
from backends.errors import OutOfMemory, UnsupportedOperation
from backends.memory import BatchRows, KVLayout, KVSpec, MemoryPool
from backends.scratch import Lifetime
from kernels.paged_kv import PAGED_ORDER, PagedKV
from kernels.spec import BoundKV

Int64Array = npt.NDArray[np.int64]

SEGMENT_BYTES = 32 << 20
"""About the size of a segment: small beside a chip, large beside a page of memory."""
SEGMENT_BLOCKS_MULTIPLE = 8
"""Makes segments whole pages of 4 KiB wherever blocks are multiples of 512 bytes."""


def paged_layout(spec: KVSpec, alignment_bytes: int) -> KVLayout:
    """A block, keys and values of all layers, is padded to a multiple of `alignment_bytes`."""
    block_bytes = -(-_used_elements(spec) * spec.dtype.itemsize // alignment_bytes)
    return KVLayout(PAGED_ORDER, block_bytes * alignment_bytes, alignment_bytes)


def _table_starts(rows: BatchRows) -> tuple[int, ...]:
    return rows.table_starts or (0,) * len(rows.context_starts)


def _used_elements(spec: KVSpec) -> int:
    return 2 * spec.layers * spec.block_tokens * spec.kv_heads * spec.head_size


class PagedMemoryPool(MemoryPool):
    """Block ids map to places of one arena through a table that is read at `bind`.

    Raises OutOfMemory naming what was asked for when the arena does not fit.
    """

    def __init__(
        self,
        device: Device,
        spec: KVSpec,
        layout: KVLayout,
        capacity: int,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._device = device
        multiple = SEGMENT_BLOCKS_MULTIPLE
        segment_blocks = max(1, segment_bytes // (layout.block_bytes * multiple)) * multiple
        try:
            self._arena = device.allocate_arena(layout.block_bytes, capacity, segment_blocks)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"no room for {capacity} KV blocks of {layout.block_bytes} bytes "
                f"({capacity * layout.block_bytes} bytes); use fewer --kv-blocks or "
                f"--block-tokens: {error}"
            ) from error
        super().__init__(spec, layout, capacity)
        self._keys, self._values = _layer_views(self._arena.bytes, spec)
        # _physical[logical] is the block's place; _logical is its inverse.
        self._physical: Int64Array = np.arange(capacity, dtype=np.int64)
        self._logical: Int64Array = np.arange(capacity, dtype=np.int64)
        self._released: set[int] = set()
        """Segments given back to the chip."""
        self._zero: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None

    @override
    def bind(self, rows: BatchRows) -> PagedKV:
        """Index tensors only; no key or value is touched."""
        tables, token_blocks, token_places = self._indices(rows)
        return PagedKV(
            keys=self._keys,
            values=self._values,
            block_tables=self._on_chip(tables),
            token_blocks=self._on_chip(token_blocks),
            token_places=self._on_chip(token_places),
            query_starts=rows.query_starts,
            context_starts=rows.context_starts,
            table_starts=_table_starts(rows),
        )

    @override
    def bind_again(self, bound: BoundKV, rows: BatchRows) -> None:
        assert isinstance(bound, PagedKV), f"{type(bound).__name__} is of another pool"
        tables, token_blocks, token_places = self._indices(rows)
        bound.block_tables = self._on_chip(tables)
        self._device.copy(torch.from_numpy(token_blocks), bound.token_blocks)
        self._device.copy(torch.from_numpy(token_places), bound.token_places)
        bound.query_starts = rows.query_starts
        bound.context_starts = rows.context_starts
        bound.table_starts = _table_starts(rows)
        bound.renew_plans()

    def _indices(self, rows: BatchRows) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Physical block tables, and of every token its block and place in it."""
        assert self._keys, "the memory pool is closed"
        tables = self._physical_tables(rows.block_tables)
        query_starts = np.asarray(rows.query_starts, dtype=np.int64)
        context_starts = np.asarray(rows.context_starts, dtype=np.int64)
        table_starts = np.asarray(_table_starts(rows), dtype=np.int64)
        assert (table_starts <= context_starts).all(), "a row begins before its first block"
        counts = np.diff(query_starts)
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        first_places = context_starts - table_starts - query_starts[:-1]
        places = np.arange(query_starts[-1]) + np.repeat(first_places, counts)
        token_blocks = tables[row_of_token, places // self.spec.block_tokens]
        return tables, token_blocks, places % self.spec.block_tokens

    def _physical_tables(self, block_tables: Sequence[Sequence[int]]) -> Int64Array:
        """All rows' tables as one array, mapped; a shorter row is padded with physical block 0."""
        counts = np.array([len(table) for table in block_tables], dtype=np.int64)
        total = int(counts.sum())
        logical = np.fromiter(chain.from_iterable(block_tables), dtype=np.int64, count=total)
        tables = np.zeros((len(counts), int(counts.max(initial=1))), dtype=np.int64)
        tables[np.arange(tables.shape[1])[None, :] < counts[:, None]] = self._places_of(logical)
        return tables

    def _places_of(self, logical: Int64Array) -> Int64Array:
        """Physical places of blocks that are about to be read or written, with memory behind."""
        self._check_ids(logical)
        self.block_references.keep(logical)
        if self._released:
            self._take_memory_for(logical)
        return self._physical[logical]

    def _check_ids(self, logical: Int64Array) -> None:
        if logical.size:
            assert logical.min() >= 0, f"negative block id {logical.min()}"
            assert logical.max() < self.capacity, f"block {logical.max()} of {self.capacity}"

    def _on_chip(self, indices: Int64Array) -> torch.Tensor:
        return self._device.to_chip(torch.from_numpy(indices))

    @override
    def retain(self, blocks: Sequence[int]) -> None:
        self._check_ids(np.asarray(blocks, dtype=np.int64))
        idle = [block for block in blocks if not self.block_references.kept[block]]
        super().retain(blocks)
        try:
            if self._released:
                self._take_memory_for(np.asarray(blocks, dtype=np.int64))
        except OutOfMemory:
            super().release(blocks)
            super().discard(idle)
            raise

    @override
    def copy_block(self, source: int, target: int) -> None:
        """One copy of contiguous bytes."""
        places = self._places_of(np.array([source, target], dtype=np.int64))
        arena = self._arena.bytes
        self._device.copy(arena[int(places[0])], arena[int(places[1])])

    @override
    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """One copy a block of a block of zeros that is kept for it."""
        if self._zero is None:
            self._zero = self._scratch_block("memory_pool.zero")
            self._device.copy(torch.zeros(self._zero.shape, dtype=torch.uint8), self._zero)
        arena = self._arena.bytes
        for physical in self._places_of(np.asarray(blocks, dtype=np.int64)):
            self._device.copy(self._zero, arena[int(physical)])

    @override
    def move_block(self, block: int, physical: int) -> None:
        """One copy if nobody wants what is at `physical`; else the two change places in three."""
        self._check_ids(np.array([block, physical]))
        origin = int(self._physical[block])
        if origin == physical:
            return
        neighbour = int(self._logical[physical])
        kept = self.block_references.kept
        if kept[block] and kept[neighbour]:
            if self._spare is None:
                self._spare = self._scratch_block("memory_pool.move")
            arena = self._arena.bytes
            self._device.copy(arena[physical], self._spare)
            self._device.copy(arena[origin], arena[physical])
            self._device.copy(self._spare, arena[origin])
        elif kept[block]:
            self._copy_to_idle(origin, physical)
        elif kept[neighbour]:
            self._copy_to_idle(physical, origin)
        self._exchange(block, neighbour)

    def _copy_to_idle(self, source: int, target: int) -> None:
        """Between places; the target's segment may have been given back."""
        self._restore(self._arena.segment_of(target))
        arena = self._arena.bytes
        self._device.copy(arena[source], arena[target])

    def _scratch_block(self, operation: str) -> torch.Tensor:
        shape = (self.layout.block_bytes,)
        return self._device.scratch.take(Lifetime.MODEL, operation, shape, torch.uint8)

    def _exchange(self, first: int, second: int) -> None:
        """Exchanges the places of two logical blocks."""
        places = int(self._physical[first]), int(self._physical[second])
        self._physical[second], self._physical[first] = places
        self._logical[places[1]], self._logical[places[0]] = first, second

    @override
    def compact(self) -> int:
        """The highest kept blocks fill the lowest places that hold nothing: one copy a move.

        places   [A][ ][B][ ][ ][C][D]    ->    [A][D][B][C][ ][ ][ ]
        """
        kept_at = self.block_references.kept[self._logical]
        kept_count = int(np.count_nonzero(kept_at))
        holes = np.flatnonzero(~kept_at[:kept_count])
        beyond = np.flatnonzero(kept_at[kept_count:])[::-1] + kept_count
        for hole, place in zip(holes.tolist(), beyond.tolist(), strict=True):
            self.move_block(int(self._logical[place]), hole)
        return len(holes)

    @override
    def trim(self) -> int:
        """Whole segments; most after `compact`."""
        kept_at = self.block_references.kept[self._logical]
        empty = [
            segment
            for segment in range(self._arena.segments)
            if segment not in self._released
            and not kept_at[np.asarray(self._arena.segment_range(segment))].any()
        ]
        if not empty:
            return 0
        # Kernels asked before may still read or write what was there.
        self._device.synchronize()
        held_bytes = self._arena.held_bytes
        for segment in empty:
            try:
                self._arena.release_segment(segment)
            except UnsupportedOperation:
                break
            self._released.add(segment)
        return held_bytes - self._arena.held_bytes

    def _take_memory_for(self, logical: Int64Array) -> None:
        """Gives blocks whose place was given back another place, or their segment again."""
        for block in logical.tolist():
            segment = self._arena.segment_of(int(self._physical[block]))
            if segment not in self._released:
                continue
            place = self._lowest_idle_place()
            if place is None:
                self._restore(segment)
            else:
                self._exchange(block, int(self._logical[place]))

    def _lowest_idle_place(self) -> int | None:
        idle_at = ~self.block_references.kept[self._logical]
        for segment in self._released:
            idle_at[np.asarray(self._arena.segment_range(segment))] = False
        found = np.flatnonzero(idle_at)
        return int(found[0]) if found.size else None

    def _restore(self, segment: int) -> None:
        if segment in self._released:
            self._arena.restore_segment(segment)
            self._released.remove(segment)

    @property
    @override
    def held_bytes(self) -> int:
        return self._arena.held_bytes

    @override
    def close(self) -> None:
        self._keys = self._values = ()
        self._arena.close()


def _layer_views(
    arena: torch.Tensor, spec: KVSpec
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Keys and values by layer, each a view [blocks, block_tokens, kv_heads, head_size]."""
    shape = (len(arena), spec.layers, 2, spec.block_tokens, spec.kv_heads, spec.head_size)
    blocks = arena.view(spec.dtype)[:, : _used_elements(spec)].view(shape)
    keys = tuple(blocks[:, layer, 0] for layer in range(spec.layers))
    values = tuple(blocks[:, layer, 1] for layer in range(spec.layers))
    return keys, values
