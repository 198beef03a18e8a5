"""A backend's block memory beside a copy in main memory that only the reference touches."""

import itertools

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

    def attend(self, rows: BatchRows, layer: int, query, q_to_kv, scale, placement=None):
        """attention of both: the backend's, then the reference's."""
        cache = self.pool.bind(rows)
        actual = self._run("attention", cache, layer, query, q_to_kv, scale, placement=placement)
        return actual, REFERENCE["attention"](self.mirror.bind(rows), layer, query, q_to_kv, scale)

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
        """Writes keys and values before each row's first token."""
        starts = (0, *itertools.accumulate(rows.context_starts))
        before = BatchRows(starts, (0,) * len(rows.context_starts), rows.block_tables)
        for layer in range(self.spec.layers):
            self.write(before, layer, *self.keys_and_values(starts[-1], generator))

    def keys_and_values(self, tokens: int, generator: torch.Generator):
        """Random keys and values of so many tokens."""
        shape = self._shape(tokens)
        return [torch.randn(shape, generator=generator).to(self.spec.dtype) for _ in range(2)]

    def _shape(self, tokens):
        return tokens, self.spec.kv_heads, self.spec.head_size


def shuffled_rows(batch, block_tokens: int, generator: torch.Generator) -> tuple[BatchRows, int]:
    """Rows of (tokens in context, tokens of the step), and how many blocks there are.

    The blocks of a row lie far apart, in shuffled order.
    """
    query_starts = (0, *itertools.accumulate(count for _, count in batch))
    needs = [-(-(context + count) // block_tokens) for context, count in batch]
    shuffled = torch.randperm(sum(needs) + 3, generator=generator).tolist()
    ends = list(itertools.accumulate(needs))
    tables = tuple(tuple(shuffled[end - need : end]) for need, end in zip(needs, ends, strict=True))
    rows = BatchRows(query_starts, tuple(context for context, _ in batch), tables)
    return rows, len(shuffled)
