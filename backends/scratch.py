"""Chip memory for workspace that outlives a call, of the worker and of kernels.

    STEP      one slab, handed out from its start     [####|##|#######|........]
    REQUEST   buffers of a slot, then of later ones   slot 3: [####] [##]
    MODEL     buffers of an epoch                     [########]

Sizes are rounded up to few buckets, so that many shapes share few buffers and a steady step takes
nothing new from the chip. Every taker names its operation: whose memory grows is then known.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Protocol

import torch

ALIGNMENT_BYTES = 512
SLAB_BYTES_MIN = 1 << 20
_VIEWS_MAX = 2048
_POISON = 0xFF
"""NaN in every floating-point dtype, -1 in signed integers."""


class Lifetime(Enum):
    """When workspace ends."""

    STEP = "step"
    REQUEST = "request"
    """For what a kernel keeps per request slot: the worker reclaims it at the request's end."""
    MODEL = "model"


class ScratchSource(Protocol):
    """What a scratch arena needs of a device."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `Device.allocate`."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `Device.copy`."""

    def reclaim(self, lifetime: Lifetime) -> None:
        """See `Device.reclaim`."""


@lru_cache(maxsize=4096)
def bucket_bytes(wanted_bytes: int) -> int:
    """The size handed out: four buckets a doubling, at most a quarter more than wanted and 512."""
    units = max(1, -(-wanted_bytes // ALIGNMENT_BYTES))
    step = 1 << max(0, (units - 1).bit_length() - 3)
    return -(-units // step) * step * ALIGNMENT_BYTES


class _Slab:
    """Memory handed out from its start on; steady steps ask for the same pieces again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.size_bytes = memory.numel()
        self.used_bytes = 0
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def take(self, size_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next `size_bytes`, which must be left, seen as a tensor at their start."""
        key = (self.used_bytes, shape, dtype)
        self.used_bytes += size_bytes
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            # Kept because making a view takes longer than all else here.
            view = self._views[key] = _tensor_in(self.memory[key[0] :], shape, dtype)
        return view


def _tensor_in(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The start of some bytes as a tensor."""
    typed: torch.Tensor = memory[: math.prod(shape) * dtype.itemsize].view(dtype)
    return typed.view(shape)


@dataclass(frozen=True, eq=False)
class _Buffer:
    memory: torch.Tensor
    operation: str


class ScratchArena:
    """The scratch of one device; belongs to the thread that computes.

    poisons: what is reclaimed is overwritten, in order with kernels, so that use after it shows.
    """

    def __init__(self, source: ScratchSource, *, poisons: bool = False) -> None:
        self.poisons = poisons
        self._source = source
        self._slabs: list[_Slab] = []
        self._next_slab_bytes = SLAB_BYTES_MIN
        self._step_bytes: Counter[str] = Counter()
        self._of_slot: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._of_model: list[_Buffer] = []
        self._idle: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._held_bytes = 0
        self._peak_bytes = 0

    def take(
        self,
        lifetime: Lifetime,
        operation: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        slot: int | None = None,
    ) -> torch.Tensor:
        """A contiguous tensor of undefined contents, the caller's until its lifetime is reclaimed.

        slot: whose request it is for; given exactly for REQUEST. Raises OutOfMemory.
        """
        assert (slot is not None) == (lifetime is Lifetime.REQUEST), f"{lifetime} of slot {slot}"
        shape = tuple(shape)
        size_bytes = bucket_bytes(math.prod(shape) * dtype.itemsize)
        if lifetime is Lifetime.STEP:
            view = self._slab_with(size_bytes).take(size_bytes, shape, dtype)
            self._step_bytes[operation] += size_bytes
            return view
        idle = self._idle[size_bytes]
        memory = idle.pop() if idle else self._allocate(size_bytes)
        kept = self._of_model if slot is None else self._of_slot[slot]
        kept.append(_Buffer(memory, operation))
        return _tensor_in(memory, shape, dtype)

    def reclaim(self, lifetime: Lifetime, slot: int | None = None) -> None:
        """Ends what was taken for a lifetime; for REQUEST, of one slot or, with None, of all.

        The memory of steps and requests is kept for the next ones; MODEL ends every lifetime and
        gives all of it back to the chip. `Device.reclaim` follows.
        """
        if lifetime is Lifetime.STEP:
            self._end_step()
        elif lifetime is Lifetime.REQUEST:
            for ended in list(self._of_slot) if slot is None else [slot]:
                self._end_buffers(self._of_slot.pop(ended, []))
        else:
            self._end_step()
            for buffers in (self._of_model, *self._of_slot.values()):
                self._end_buffers(buffers)
            self._give_back()
        self._source.reclaim(lifetime)

    def bytes_by_operation(self) -> dict[str, int]:
        """Bytes taken and not reclaimed, by the operation that took them."""
        taken = Counter(self._step_bytes)
        for buffers in (self._of_model, *self._of_slot.values()):
            for buffer in buffers:
                taken[buffer.operation] += buffer.memory.numel()
        return dict(taken)

    @property
    def bytes_held(self) -> int:
        """What the arena takes of the chip, reclaimed memory that it keeps included."""
        return self._held_bytes

    @property
    def bytes_peak(self) -> int:
        """The most it ever held."""
        return self._peak_bytes

    def _slab_with(self, size_bytes: int) -> _Slab:
        """A slab with so much left."""
        for slab in self._slabs:
            if slab.size_bytes - slab.used_bytes >= size_bytes:
                return slab
        slab = _Slab(self._allocate(max(size_bytes, self._next_slab_bytes)))
        self._next_slab_bytes = SLAB_BYTES_MIN
        self._slabs.append(slab)
        return slab

    def _end_step(self) -> None:
        for slab in self._slabs:
            self._poison(slab.memory[: slab.used_bytes])
            slab.used_bytes = 0
        if len(self._slabs) > 1:
            # One slab for all of it: holes between slabs would otherwise add up with every shape.
            self._next_slab_bytes = max(SLAB_BYTES_MIN, bucket_bytes(self._step_bytes.total()))
            self._held_bytes -= sum(slab.size_bytes for slab in self._slabs)
            self._slabs.clear()
        self._step_bytes.clear()

    def _end_buffers(self, buffers: list[_Buffer]) -> None:
        for buffer in buffers:
            self._poison(buffer.memory)
            self._idle[buffer.memory.numel()].append(buffer.memory)

    def _give_back(self) -> None:
        self._slabs.clear()
        self._next_slab_bytes = SLAB_BYTES_MIN
        self._of_slot.clear()
        self._of_model.clear()
        self._idle.clear()
        self._held_bytes = 0

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        memory = self._source.allocate((size_bytes,), torch.uint8)
        self._held_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        return memory

    def _poison(self, memory: torch.Tensor) -> None:
        if self.poisons and memory.numel():
            self._source.copy(torch.full(memory.shape, _POISON, dtype=torch.uint8), memory)
