"""The memory that KV blocks live in: one address range of equal blocks, in whole segments.

    bytes  [ block 0 | block 1 | ... | block n ][ ...        ][ ...      ]
             segment 0                            segment 1     the last one may be shorter

A segment can be given back to the chip and taken again; the addresses of all blocks stay what they
are, so whoever holds views of `bytes` keeps them and merely must not touch a released segment.
"""

from abc import ABC, abstractmethod

import torch
from typing_extensions import override

from backends.errors import UnsupportedOperation


class Arena(ABC):
    """Blocks of one size at fixed addresses. The owner calls `close` once; nothing is held after.

    bytes: uint8 [blocks, block_bytes], contiguous, contents undefined. A segment index outside the
    arena, releasing twice, or restoring what was not released is a broken invariant and asserts.
    """

    def __init__(self, blocks: int, block_bytes: int, segment_blocks: int) -> None:
        assert block_bytes > 0, f"blocks of {block_bytes} bytes"
        assert segment_blocks > 0, f"segments of {segment_blocks} blocks"
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.segment_blocks = segment_blocks

    @property
    @abstractmethod
    def bytes(self) -> torch.Tensor:
        """All blocks, also those of released segments; asserts once the arena is closed."""

    @property
    def segments(self) -> int:
        """How many segments there are."""
        return -(-self.blocks // self.segment_blocks)

    @property
    def held_bytes(self) -> int:
        """What the arena takes of the chip now: released segments do not count."""
        return self.blocks * self.block_bytes

    def segment_of(self, block: int) -> int:
        """The segment a block lies in."""
        assert 0 <= block < self.blocks, f"block {block} of {self.blocks}"
        return block // self.segment_blocks

    def segment_range(self, segment: int) -> range:
        """The blocks of a segment."""
        assert 0 <= segment < self.segments, f"segment {segment} of {self.segments}"
        first = segment * self.segment_blocks
        return range(first, min(first + self.segment_blocks, self.blocks))

    def release_segment(self, segment: int) -> None:
        """Gives a segment's memory back to the chip; its contents are lost.

        No work that touches it may be outstanding. Raises UnsupportedOperation.
        """
        raise UnsupportedOperation(f"this arena cannot give back segment {segment} alone")

    def restore_segment(self, segment: int) -> None:
        """Takes a released segment's memory again, contents undefined.

        Raises OutOfMemory, and the segment is then still released; or UnsupportedOperation.
        """
        raise UnsupportedOperation(f"this arena cannot take segment {segment} again")

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; views of `bytes` must not be used any more."""


class WholeArena(Arena):
    """The default for any backend: one allocation, given back as a whole."""

    def __init__(self, memory: torch.Tensor, segment_blocks: int) -> None:
        """memory: uint8 [blocks, block_bytes] on the chip; the arena owns it from here on."""
        blocks, block_bytes = memory.shape
        super().__init__(blocks, block_bytes, segment_blocks)
        self._memory: torch.Tensor | None = memory

    @property
    @override
    def bytes(self) -> torch.Tensor:
        assert self._memory is not None, "the arena is closed"
        return self._memory

    @override
    def close(self) -> None:
        self._memory = None
