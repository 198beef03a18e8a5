"""KV memory on CPU cores: an anonymous mapping, whose pages come and go while addresses stay."""

import contextlib
import mmap
from collections.abc import Callable

import torch
from typing_extensions import override

from backends.arena import Arena


class MappedArena(Arena):
    """Pages are taken when first written, and a released segment's go back to the system.

    take: called with bytes before they count as held, may raise OutOfMemory. give: called with
    bytes that are held no more. The constructor raises OSError if the mapping fails.
    """

    def __init__(
        self,
        blocks: int,
        block_bytes: int,
        segment_blocks: int,
        take: Callable[[int], None],
        give: Callable[[int], None],
    ) -> None:
        super().__init__(blocks, block_bytes, segment_blocks)
        self._take = take
        self._give = give
        self._released: set[int] = set()
        self._held_bytes = blocks * block_bytes
        take(self._held_bytes)
        try:
            self._mapping = mmap.mmap(-1, self._held_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError):
            give(self._held_bytes)
            raise
        # Attention reads a block here and a block there: small pages cost it a table walk each.
        with contextlib.suppress(OSError, AttributeError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._mapping, dtype=torch.uint8).view(
            blocks, block_bytes
        )

    @property
    @override
    def bytes(self) -> torch.Tensor:
        assert self._bytes is not None, "the arena is closed"
        return self._bytes

    @property
    @override
    def held_bytes(self) -> int:
        return self._held_bytes

    @override
    def release_segment(self, segment: int) -> None:
        """Whole pages; one that holds part of a neighbour stays."""
        first, stop = self._byte_range(segment)
        assert segment not in self._released, f"segment {segment} is released twice"
        self._released.add(segment)
        self._forget_pages(first, stop)
        self._held_bytes -= stop - first
        self._give(stop - first)

    @override
    def restore_segment(self, segment: int) -> None:
        """Its pages read as zeros until they are written."""
        first, stop = self._byte_range(segment)
        assert segment in self._released, f"segment {segment} was not released"
        self._take(stop - first)
        self._released.remove(segment)
        self._held_bytes += stop - first

    @override
    def close(self) -> None:
        """Views that outlive the arena read zeros; the addresses go with the last of them."""
        if self._bytes is None:
            return
        self._forget_pages(0, len(self._mapping))
        self._bytes = None
        self._give(self._held_bytes)
        self._held_bytes = 0

    def _byte_range(self, segment: int) -> tuple[int, int]:
        blocks = self.segment_range(segment)
        return blocks.start * self.block_bytes, blocks.stop * self.block_bytes

    def _forget_pages(self, first: int, stop: int) -> None:
        """Whole pages within; the last page of the mapping ends with it."""
        first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        if stop < len(self._mapping):
            stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < stop:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, stop - first)
