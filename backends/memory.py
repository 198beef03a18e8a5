"""Memory contract: equal KV blocks on one chip, logical ids above, physical ids below.

    logical id (control plane)  --bind-->  physical id (arena)  -->  bytes in the backend's KVLayout

The layers above name logical blocks only; the mapping is read when a kernel is launched, so a pool
may move a block between steps without anyone noticing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    """The KV memory of one chip. Blocks are logical ids 0 .. capacity - 1.

    Required: `bind`. A pool owns its arena until `close`.
    """

    def __init__(self, spec: KVSpec, layout: KVLayout, capacity: int) -> None:
        self.spec = spec
        self.layout = layout
        self.capacity = capacity

    @abstractmethod
    def bind(self, rows: BatchRows) -> BoundKV:
        """Maps the rows' logical blocks to physical ones for the kernels of one step."""

    @abstractmethod
    def copy_block(self, source: int, target: int) -> None:
        """Copies the contents of one logical block to another, all layers."""

    @abstractmethod
    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Sets the contents of logical blocks to zero, all layers."""

    @abstractmethod
    def move_block(self, block: int, physical: int) -> None:
        """Puts a logical block at another physical place; bound steps must be done."""

    def close(self) -> None:  # noqa: B027 - optional
        """Gives the arena back."""
