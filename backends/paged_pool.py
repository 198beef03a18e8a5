"""The default memory pool: a paged arena on a device, with a logical to physical map of its own."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from backends.device import Device
from backends.errors import OutOfMemory
from backends.memory import BatchRows, KVLayout, KVSpec, MemoryPool
from kernels.paged_kv import PAGED_ORDER, PagedKV

Int64Array = npt.NDArray[np.int64]


def paged_layout(spec: KVSpec, alignment_bytes: int) -> KVLayout:
    """Keys and values of a block and layer each start at a multiple of `alignment_bytes`."""
    part_bytes = _part_elements(spec, alignment_bytes) * spec.dtype.itemsize
    return KVLayout(
        order=PAGED_ORDER,
        block_bytes=2 * spec.layers * part_bytes,
        alignment_bytes=alignment_bytes,
    )


def _part_elements(spec: KVSpec, alignment_bytes: int) -> int:
    """Elements that the keys (or values) of one block and layer take, padding included."""
    used_bytes = spec.block_tokens * spec.kv_heads * spec.head_size * spec.dtype.itemsize
    assert alignment_bytes % spec.dtype.itemsize == 0, "alignment splits an element"
    return -(-used_bytes // alignment_bytes) * alignment_bytes // spec.dtype.itemsize


class PagedMemoryPool(MemoryPool):
    """Keys and values in two arenas of one allocation; block ids map to places through a table.

    Raises OutOfMemory naming what was asked for when the arena does not fit.
    """

    def __init__(self, device: Device, spec: KVSpec, layout: KVLayout, capacity: int) -> None:
        super().__init__(spec, layout, capacity)
        self._device = device
        part = _part_elements(spec, layout.alignment_bytes)
        try:
            arena = device.allocate((2, spec.layers, capacity, part), spec.dtype)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"no room for {capacity} KV blocks of {layout.block_bytes} bytes "
                f"({capacity * layout.block_bytes} bytes); use fewer blocks: {error}"
            ) from error
        used = spec.block_tokens * spec.kv_heads * spec.head_size
        block_shape = (spec.block_tokens, spec.kv_heads, spec.head_size)
        self._arena: torch.Tensor | None = arena[..., :used].view(
            2, spec.layers, capacity, *block_shape
        )
        # _physical[logical] is the block's place; _logical is its inverse.
        self._physical: Int64Array = np.arange(capacity, dtype=np.int64)
        self._logical: Int64Array = np.arange(capacity, dtype=np.int64)

    @override
    def bind(self, rows: BatchRows) -> PagedKV:
        """Index tensors only; no key or value is touched."""
        arena = self._open_arena()
        tables = self._physical_tables(rows.block_tables)
        query_starts = np.asarray(rows.query_starts, dtype=np.int64)
        context_starts = np.asarray(rows.context_starts, dtype=np.int64)
        counts = np.diff(query_starts)
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        first_positions = context_starts - query_starts[:-1]
        positions = np.arange(query_starts[-1]) + np.repeat(first_positions, counts)
        token_blocks = tables[row_of_token, positions // self.spec.block_tokens]
        return PagedKV(
            keys=arena[0],
            values=arena[1],
            block_tables=self._on_chip(tables),
            token_blocks=self._on_chip(token_blocks),
            token_places=self._on_chip(positions % self.spec.block_tokens),
            query_starts=rows.query_starts,
            context_starts=rows.context_starts,
        )

    def _physical_tables(self, block_tables: Sequence[Sequence[int]]) -> Int64Array:
        """All rows' tables as one array, mapped; a shorter row is padded with physical block 0."""
        counts = np.array([len(table) for table in block_tables], dtype=np.int64)
        total = int(counts.sum())
        logical = np.fromiter(chain.from_iterable(block_tables), dtype=np.int64, count=total)
        self._check_ids(logical)
        tables = np.zeros((len(counts), int(counts.max(initial=1))), dtype=np.int64)
        tables[np.arange(tables.shape[1])[None, :] < counts[:, None]] = self._physical[logical]
        return tables

    def _check_ids(self, logical: Int64Array) -> None:
        if logical.size:
            assert logical.min() >= 0, f"negative block id {logical.min()}"
            assert logical.max() < self.capacity, f"block {logical.max()} of {self.capacity}"

    def _on_chip(self, indices: Int64Array) -> torch.Tensor:
        return self._device.to_chip(torch.from_numpy(indices))

    @override
    def copy_block(self, source: int, target: int) -> None:
        self._check_ids(np.array([source, target]))
        self._copy_physical(int(self._physical[source]), int(self._physical[target]))

    def _copy_physical(self, source: int, target: int) -> None:
        arena = self._open_arena()
        self._device.copy(arena[:, :, source], arena[:, :, target])

    @override
    def zero_blocks(self, blocks: Sequence[int]) -> None:
        logical = np.asarray(blocks, dtype=np.int64)
        self._check_ids(logical)
        arena = self._open_arena()
        for physical in self._physical[logical]:
            arena[:, :, int(physical)].zero_()

    @override
    def move_block(self, block: int, physical: int) -> None:
        """The block that lived at `physical` changes places with it, contents and all."""
        self._check_ids(np.array([block, physical]))
        origin = int(self._physical[block])
        if origin == physical:
            return
        arena = self._open_arena()
        neighbour = int(self._logical[physical])
        displaced = arena[:, :, physical].clone()
        self._copy_physical(origin, physical)
        self._device.copy(displaced, arena[:, :, origin])
        self._physical[block], self._physical[neighbour] = physical, origin
        self._logical[physical], self._logical[origin] = block, neighbour

    @override
    def close(self) -> None:
        self._arena = None

    def _open_arena(self) -> torch.Tensor:
        assert self._arena is not None, "the memory pool is closed"
        return self._arena
