"""The allocator of a simulated chip: exact to the byte, and as prone to fragments as a real one.

It splits free pieces and merges neighbours when memory comes back, but never moves anything: a
request fails when no single piece holds it, however much is free in total.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from backends.errors import DeviceError, OutOfMemory
from backends.simulator.poisoned_memory import PoisonedMemory
from backends.simulator.profile import AllocationPolicy


class MemoryMisuse(DeviceError):
    """Memory was given back twice, used after that, or is not this chip's."""


@dataclass(frozen=True)
class Region:
    """Allocated bytes of one chip; `size` includes the rounding up to the chip's alignment."""

    address: int
    size: int
    memory: PoisonedMemory = field(repr=False, compare=False)

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the region's first bytes; it must fit."""
        return self.memory.view(self.address - self.memory.address, shape, dtype)


class ChipMemory:
    """All memory of one chip."""

    def __init__(
        self, capacity: int, alignment: int, policy: AllocationPolicy = "best_fit"
    ) -> None:
        self.capacity = capacity
        self.used = 0
        self._alignment = alignment
        self._policy = policy
        self._memory = PoisonedMemory(capacity)
        # Free pieces by offset, and the offsets in order: neighbours are found by place.
        self._free: dict[int, int] = {0: capacity} if capacity else {}
        self._offsets: list[int] = sorted(self._free)
        self._live: dict[int, Region] = {}
        self._overdrawn: set[int] = set()
        # Memory above this was never handed out, so nothing made it poison yet.
        self._touched = 0

    @property
    def free(self) -> int:
        """Free bytes, in however many pieces."""
        return self.capacity - self.used

    @property
    def largest_piece(self) -> int:
        """The most that one allocation can get."""
        return max(self._free.values(), default=0)

    def allocate(self, size: int) -> Region:
        """Poisoned bytes. Raises OutOfMemory naming what was asked, is free, and is in a piece."""
        rounded = self._rounded(size)
        offset = self._find(rounded)
        if offset is None:
            raise OutOfMemory(
                f"{rounded} bytes asked ({size} before rounding up to {self._alignment}); "
                f"{self.free} of {self.capacity} bytes are free, the largest piece has "
                f"{self.largest_piece}; free memory, or ask for less"
            )
        self._cut(offset, rounded)
        return self._hand_out(Region(self._memory.address + offset, rounded, self._memory))

    def allocate_overdrawn(self, size: int) -> Region:
        """Bytes the chip does not have: for a chip that reports running out of memory later."""
        memory = PoisonedMemory(self._rounded(size))
        memory.poison(0, memory.size)
        self._overdrawn.add(memory.address)
        return self._hand_out(Region(memory.address, memory.size, memory))

    def give_back(self, region: Region) -> None:
        """Poisons and frees. Raises MemoryMisuse for what is not allocated."""
        if self._live.pop(region.address, None) != region:
            raise MemoryMisuse(f"{region} is freed twice or is not this chip's; free it once")
        if region.address in self._overdrawn:
            self._overdrawn.discard(region.address)
            return
        offset = region.address - self._memory.address
        self._memory.poison(offset, region.size)
        self.used -= region.size
        self._merge(offset, region.size)

    def holds(self, region: Region) -> bool:
        """Whether the region is allocated."""
        return self._live.get(region.address) == region

    def find(self, tensor: torch.Tensor) -> Region:
        """The region a tensor lies in. Raises MemoryMisuse if it is freed or elsewhere."""
        region = self._live.get(tensor.untyped_storage().data_ptr())
        if region is None:
            raise MemoryMisuse(
                f"a tensor of {tuple(tensor.shape)} is not in this chip's memory, or was freed; "
                "copy it to the chip first and keep it until its last use"
            )
        return region

    def _rounded(self, size: int) -> int:
        return max(1, -(-size // self._alignment)) * self._alignment

    def _find(self, size: int) -> int | None:
        fitting = [offset for offset in self._offsets if self._free[offset] >= size]
        if not fitting:
            return None
        if self._policy == "first_fit":
            return fitting[0]
        return min(fitting, key=lambda offset: (self._free[offset], offset))

    def _cut(self, offset: int, size: int) -> None:
        left = self._free.pop(offset) - size
        place = bisect.bisect_left(self._offsets, offset)
        if left:
            self._free[offset + size] = left
            self._offsets[place] = offset + size
        else:
            del self._offsets[place]
        self.used += size
        end = offset + size
        if end > self._touched:
            start = max(offset, self._touched)
            self._memory.poison(start, end - start)
            self._touched = end

    def _merge(self, offset: int, size: int) -> None:
        place = bisect.bisect_left(self._offsets, offset)
        after = self._offsets[place] if place < len(self._offsets) else None
        if after == offset + size:
            size += self._free.pop(after)
            del self._offsets[place]
        before = self._offsets[place - 1] if place else None
        if before is not None and before + self._free[before] == offset:
            self._free[before] += size
            return
        self._free[offset] = size
        self._offsets.insert(place, offset)

    def _hand_out(self, region: Region) -> Region:
        self._live[region.address] = region
        return region
