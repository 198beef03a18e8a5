"""Memory contract: equal KV blocks on one chip, logical ids above, physical ids below.

    logical id (control plane)  --bind-->  physical id (arena)  -->  bytes in the backend's KVLayout

The layers above name logical blocks only; the mapping is read when a kernel is launched, so a pool
may move a block between steps without anyone noticing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.block_references import BlockReferences
from backends.errors import UnsupportedOperation
from kernels.spec import BoundKV


@dataclass(frozen=True)
class KVSpec:
    """What the model needs of a block on this chip; `layers`: those of one KV group."""

    layers: int
    kv_heads: int
    head_size: int
    block_tokens: int
    dtype: torch.dtype


@dataclass(frozen=True)
class KVLayout:
    """How a backend lays out a block.

    order names the axes for kernels to declare support of; block_bytes includes alignment padding.
    """

    order: str
    block_bytes: int
    alignment_bytes: int


@dataclass(frozen=True)
class BatchRows:
    """The rows of a step in one KV group, on the host.

    query_starts[r] .. query_starts[r + 1] are row r's tokens in the step's token dimension;
    context_starts[r] is the position of its first token; block_tables[r] the logical blocks of the
    row, enough to hold its last token; table_starts[r] is the position of the first token in the
    first of them, above 0 where the blocks behind a window were given back. Empty: all are 0.
    """

    query_starts: tuple[int, ...]
    context_starts: tuple[int, ...]
    block_tables: tuple[Sequence[int], ...]
    table_starts: tuple[int, ...] = ()


class MemoryPool(ABC):
    """The KV memory of one chip: `capacity` equal blocks, allocated when the pool is made.

    Blocks are logical ids 0 .. capacity - 1. The control plane's block ledger, one for all ranks
    of a group, is the one owner of which block a request gets, of sharing and of caching. The
    pool's `references` are what this worker's own slots hold of that: they show that no two slots
    write one block and that nothing stays behind, and they tell idle blocks from those whose
    contents a later request may want. Finding the bytes (`bind`), copying, zeroing and moving them
    is done here.

    Required: `bind`; a pool without one of the others raises UnsupportedOperation. A block id
    outside the capacity is a broken invariant and asserts. A pool owns its arena until `close`.
    """

    def __init__(self, spec: KVSpec, layout: KVLayout, capacity: int) -> None:
        self.spec = spec
        self.layout = layout
        self.capacity = capacity
        self.block_references = BlockReferences(capacity)

    @property
    def quota(self) -> int:
        """Most blocks that may be referenced at once; the capacity unless lowered."""
        return self.block_references.quota

    @quota.setter
    def quota(self, blocks: int) -> None:
        assert 0 <= blocks <= self.capacity, f"a quota of {blocks} of {self.capacity} blocks"
        self.block_references.quota = blocks

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can give now."""
        return self.block_references.free_count

    @property
    def referenced_count(self) -> int:
        """Blocks with a reference."""
        return self.block_references.referenced_count

    def references(self, block: int) -> int:
        """How many times a block is retained."""
        return self.block_references.references(block)

    def retain(self, blocks: Sequence[int]) -> None:
        """One more reference of each, for blocks the ledger gave to a slot.

        Raises OutOfMemory beyond the quota; nothing is then changed.
        """
        self.block_references.retain(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less of each; contents stay. A release too many asserts."""
        self.block_references.release(blocks)

    def allocate(self, count: int) -> list[int]:
        """`count` idle blocks with one reference each, for work of the worker's own.

        `release` makes them idle again. Not while the ledger gives out blocks of this pool: it
        would not know. Raises OutOfMemory naming the numbers; nothing is then changed.
        """
        return self.block_references.allocate(count)

    def discard(self, blocks: Sequence[int]) -> None:
        """The ledger caches these blocks no more: their contents need not survive."""
        self.block_references.discard(blocks)

    @property
    def held_bytes(self) -> int:
        """Bytes the pool takes of the chip now."""
        return self.capacity * self.layout.block_bytes

    @abstractmethod
    def bind(self, rows: BatchRows) -> BoundKV:
        """Maps the rows' logical blocks to physical ones for the kernels of one step.

        The result sees the pool's own bytes and is valid until the step ends or a block moves;
        the kernels that use it must have been asked for by then, not be done.
        """

    def bind_again(self, bound: BoundKV, rows: BatchRows) -> None:  # noqa: ARG002
        """Binds other rows, of as many tokens, to what `bind` returned: captured work reads them.

        Valid as what `bind` returns is.
        """
        raise UnsupportedOperation("this memory pool cannot bind rows for captured work")

    def copy_block(self, source: int, target: int) -> None:
        """Copies one logical block to another, all layers, in order with kernels."""
        raise UnsupportedOperation(f"this memory pool cannot copy block {source} to {target}")

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Sets the contents of logical blocks to zero, all layers, in order with kernels."""
        raise UnsupportedOperation(f"this memory pool cannot zero blocks {list(blocks)}")

    def move_block(self, block: int, physical: int) -> None:
        """Puts a logical block at another physical place, in order with kernels; between steps.

        The contents move along; the block that was there takes the place that became free.
        """
        raise UnsupportedOperation(f"this memory pool cannot move block {block} to {physical}")

    def compact(self) -> int:
        """Moves blocks with references or contents to the lowest places; how many were moved.

        In order with kernels; between steps.
        """
        raise UnsupportedOperation("this memory pool cannot compact its blocks")

    def trim(self) -> int:
        """Gives memory that holds no block with references or contents back to the chip: bytes.

        Waits for the chip. What is given back is taken again when its blocks are needed, which
        may raise OutOfMemory. A pool whose memory is one piece gives back nothing.
        """
        return 0

    def close(self) -> None:  # noqa: B027 - optional
        """Gives the arena back."""
