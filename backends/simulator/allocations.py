"""A simulated chip's memory as its host asks for it: given back in order with the chip's work."""

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from backends.device import MemoryInfo
from backends.errors import OutOfMemory, UnsupportedOperation
from backends.simulator.engine import Engine
from backends.simulator.memory import ChipMemory, MemoryMisuse, Region
from backends.simulator.workspaces import Workspaces


class Allocations:
    """What is allocated on one chip. Its lock is the engine's."""

    def __init__(self, engine: Engine) -> None:
        profile = engine.profile
        self.workspaces = Workspaces()
        self._engine = engine
        self._profile = profile
        self._memory = ChipMemory(
            profile.memory_bytes.value,
            profile.allocation_alignment_bytes.value,
            profile.allocation_policy.value,
        )
        # Freed by the host, and still used by work that is pending.
        self._leaving: set[int] = set()
        # Tensors drop at any moment, also within a call of this class: they only queue up here.
        self._dropped: deque[Region] = deque()

    def allocate(self, size: int) -> Region:
        """Poisoned bytes. Raises OutOfMemory, or reports it where the chip defers that."""
        try:
            return self._find_room(size)
        except OutOfMemory as error:
            return self.refuse(size, error)

    def refuse(self, size: int, error: OutOfMemory) -> Region:
        """Raises the error, or hands out what is not there and reports the error later."""
        if not self._profile.deferred_out_of_memory.value:
            raise error
        self._engine.report(error)
        return self._memory.allocate_overdrawn(size)

    def view(self, region: Region, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a region, which is freed once neither host nor chip uses the tensor."""
        tensor = region.view(shape, dtype)
        weakref.finalize(tensor.untyped_storage(), self._dropped.append, region).atexit = False
        return tensor

    def size_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of a tensor. Raises UnsupportedOperation for a dtype the chip does not have."""
        if dtype == torch.float64 and not self._profile.has_float64.value:
            raise UnsupportedOperation(f"{self._profile.name} has no float64; use float32")
        return math.prod(shape) * dtype.itemsize

    def check(self, region: Region) -> None:
        """Raises MemoryMisuse for a region that is not allocated, or freed already."""
        if not self._memory.holds(region) or region.address in self._leaving:
            raise MemoryMisuse(f"{region} is used or freed after it was freed, or not this chip's")

    def addresses(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        """Where the tensors' memory is. Raises MemoryMisuse for freed memory or another's."""
        addresses = frozenset(self._memory.find(tensor).address for tensor in tensors)
        if not self._leaving.isdisjoint(addresses):
            raise MemoryMisuse("a tensor was freed; keep it until its last use is asked for")
        return addresses

    def release(self, region: Region) -> None:
        """Gives memory back behind the pending work that uses it."""
        users = self._engine.users_of(region.address)
        if not users:
            self._memory.give_back(region)
            return
        self._leaving.add(region.address)
        self._engine.mark("free", self._engine.default_stream, users, partial(self._forget, region))

    def collect_dropped(self) -> None:
        """Gives back what no tensor shows any more."""
        while self._dropped:
            self.release(self._dropped.popleft())

    def info(self) -> MemoryInfo:
        """Total and free bytes."""
        self.collect_dropped()
        return MemoryInfo(self._memory.capacity, self._memory.free)

    def keep_workspace(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Takes a kernel's hidden buffer for shapes it meets first. Raises OutOfMemory."""
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        size = self._profile.workspace_bytes.value
        self.workspaces.keep(name, shapes, partial(self._find_room, size))

    def _find_room(self, size: int) -> Region:
        self.collect_dropped()
        try:
            return self._memory.allocate(size)
        except OutOfMemory:
            # Work that is asked for holds memory that is free when it is done.
            self._engine.run_ready()
            self.collect_dropped()
        return self._memory.allocate(size)

    def _forget(self, region: Region) -> None:
        self._leaving.discard(region.address)
        self._memory.give_back(region)
