"""A backend's block memory beside a copy in main memory that only the reference touches."""

import itertools
import operator

import torch

from backends.device import Device
from backends.interface import BackendRuntime, BatchRows, KVSpec
from backends.paged_pool import PagedMemoryPool, paged_layout
from backends.plugin import ChipDescription
from kernels.reference import REFERENCE_IMPLEMENTATIONS

REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}


class MainMemory(Device):
    """What a backend must have at least, over main memory."""

    def allocate(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def copy(self, source, target):
        target.copy_(source)


class MirroredPool:
    """`call` is a KernelCalls: it writes and reads the backend's pool, the reference the mirror."""

    def __init__(self, runtime: BackendRuntime, device: Device, spec: KVSpec, blocks, call) -> None:
        self.spec = spec
        self.pool = runtime.create_memory_pool(device, spec, blocks)
        mirror = MainMemory(ChipDescription(0, "main memory", 1 << 30))
        self.mirror = PagedMemoryPool(mirror, spec, paged_layout(spec, 512), blocks)
        self._blocks = blocks
        self._call = call
        self._layout = runtime.kv_layout(spec).order

    def close(self) -> None:
        self.pool.close()
        self.mirror.close()

    def write(self, rows: BatchRows, layer: int, key, value, placement=None) -> None:
        """write_kv on both."""
        self._run("write_kv", self.pool.bind(rows), layer, key, value, placement=placement)
        REFERENCE["write_kv"](self.mirror.bind(rows), layer, key, value)

    def attend(
        self,
        rows: BatchRows,
        layer: int,
        query,
        q_to_kv,
        scale,
        placement=None,
        window=0,
        soft_cap=0.0,
    ):
        """attention of both: the backend's, then the reference's."""
        arguments = (layer, query, q_to_kv, scale, window, soft_cap)
        actual = self._run("attention", self.pool.bind(rows), *arguments, placement=placement)
        return actual, REFERENCE["attention"](self.mirror.bind(rows), *arguments)

    def _run(self, operation, *arguments, placement):
        return self._call(
            operation,
            *arguments,
            dtype=self.spec.dtype,
            layout=self._layout,
            placement=placement,
        )

    def poison(self) -> None:
        """What nobody wrote is not a number, as memory of a fresh arena may be."""
        tokens = self._blocks * self.spec.block_tokens
        rows = BatchRows((0, tokens), (0,), (range(self._blocks),))
        nothing = torch.full(self._shape(tokens), float("nan"), dtype=self.spec.dtype)
        for layer in range(self.spec.layers):
            self.write(rows, layer, nothing, nothing)

    def fill_context(self, rows: BatchRows, generator: torch.Generator) -> None:
        """Writes keys and values before each row's first token, as far back as it has blocks."""
        first = rows.table_starts or (0,) * len(rows.context_starts)
        counts = map(operator.sub, rows.context_starts, first)
        starts = (0, *itertools.accumulate(counts))
        before = BatchRows(starts, first, rows.block_tables, first)
        for layer in range(self.spec.layers):
            self.write(before, layer, *self.keys_and_values(starts[-1], generator))

    def poison_unseen(self, rows: BatchRows, window: int) -> None:
        """What a row holds in front of the window of its first token becomes not a number."""
        first = rows.table_starts or (0,) * len(rows.context_starts)
        seen_from = [
            max(start, context - window + 1)
            for start, context in zip(first, rows.context_starts, strict=True)
        ]
        counts = map(operator.sub, seen_from, first)
        starts = (0, *itertools.accumulate(counts))
        nothing = torch.full(self._shape(starts[-1]), float("nan"), dtype=self.spec.dtype)
        for layer in range(self.spec.layers):
            self.write(BatchRows(starts, first, rows.block_tables, first), layer, nothing, nothing)

    def keys_and_values(self, tokens: int, generator: torch.Generator):
        """Random keys and values of so many tokens."""
        shape = self._shape(tokens)
        return [torch.randn(shape, generator=generator).to(self.spec.dtype) for _ in range(2)]

    def _shape(self, tokens):
        return tokens, self.spec.kv_heads, self.spec.head_size


def shuffled_rows(
    batch, block_tokens: int, generator: torch.Generator, window: int = 0
) -> tuple[BatchRows, int]:
    """Rows of (tokens in context, tokens of the step), and how many blocks there are.

    The blocks of a row lie far apart, in shuffled order. With a window they are only those that
    the row still sees.
    """
    query_starts = (0, *itertools.accumulate(count for _, count in batch))
    dropped = [
        max(0, context - window + 1) // block_tokens if window else 0 for context, _ in batch
    ]
    needs = [
        -(-(context + count) // block_tokens) - gone
        for (context, count), gone in zip(batch, dropped, strict=True)
    ]
    shuffled = torch.randperm(sum(needs) + 3, generator=generator).tolist()
    ends = list(itertools.accumulate(needs))
    tables = tuple(tuple(shuffled[end - need : end]) for need, end in zip(needs, ends, strict=True))
    contexts = tuple(context for context, _ in batch)
    table_starts = tuple(gone * block_tokens for gone in dropped)
    rows = BatchRows(query_starts, contexts, tables, table_starts)
    return rows, len(shuffled)
