"""Memory contract: equal KV blocks on one chip, logical ids above, physical ids below.

    logical id (control plane)  --bind-->  physical id (arena)  -->  bytes in the backend's KVLayout

The layers above name logical blocks only; the mapping is read when a kernel is launched, so a pool
may move a block between steps without anyone noticing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.errors import UnsupportedOperation
from kernels.spec import BoundKV


@dataclass(frozen=True)
class KVSpec:
    """What the model needs of a block on this chip."""

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
    """The rows of a step, on the host.

    query_starts[r] .. query_starts[r + 1] are row r's tokens in the step's token dimension;
    context_starts[r] is the position of its first token; block_tables[r] the logical blocks of the
    row, enough to hold its last token.
    """

    query_starts: tuple[int, ...]
    context_starts: tuple[int, ...]
    block_tables: tuple[Sequence[int], ...]


class MemoryPool(ABC):
    """The KV memory of one chip: `capacity` equal blocks, all allocated when the pool is made.

    Blocks are logical ids 0 .. capacity - 1. Which of them are free, how many requests share one
    and how many a request may have is decided above, in the control plane's block ledger, one for
    all ranks of a group: giving a block away or back moves no bytes and does not reach the pool.
    What does reach it is done here: finding the bytes (`bind`), copying, zeroing and moving them.

    Required: `bind`; a pool without one of the others raises UnsupportedOperation. A block id
    outside the capacity is a broken invariant and asserts. A pool owns its arena until `close`.
    """

    def __init__(self, spec: KVSpec, layout: KVLayout, capacity: int) -> None:
        self.spec = spec
        self.layout = layout
        self.capacity = capacity

    @abstractmethod
    def bind(self, rows: BatchRows) -> BoundKV:
        """Maps the rows' logical blocks to physical ones for the kernels of one step.

        The result sees the pool's own bytes and is valid until the step ends or a block moves.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Copies one logical block to another, all layers, in order with kernels."""
        raise UnsupportedOperation(f"this memory pool cannot copy block {source} to {target}")

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Sets the contents of logical blocks to zero, all layers, in order with kernels."""
        raise UnsupportedOperation(f"this memory pool cannot zero blocks {list(blocks)}")

    def move_block(self, block: int, physical: int) -> None:
        """Puts a logical block at another physical place; bound steps must be done.

        The contents move along; the block that was there takes the place that became free.
        """
        raise UnsupportedOperation(f"this memory pool cannot move block {block} to {physical}")

    def close(self) -> None:  # noqa: B027 - optional
        """Gives the arena back."""
