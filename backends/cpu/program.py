"""A step as one native program: what kernels would compute is recorded, and run without Python.

    function()   linear  norm  all_reduce  linear ...   a call        linear ...
                 └────────── native part ───────────┘  Python part  └─ native part ─┘

Calls that have a native form, as the collectives through shared memory have, are within native
parts: then the whole program is one.

What recorded operations return lies in memory that all programs of a chip share, for they run one
after the other: what a program gave is gone when the next one runs.
"""

import math
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_char
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from backends.cpu.kernel_library import Engine
from backends.device import CapturedProgram
from backends.native_call import NativeCall, NativeForm
from backends.scratch import Lifetime, ScratchArena

SLAB_BYTES = 4 << 20
ALIGNMENT_BYTES = 64
"""A line of the cache: no two results share one."""

Bytes = npt.NDArray[np.uint8]


class ProgramMemory:
    """Where recorded operations put their results: a place is free again when its tensor is gone.

    scratch: where slabs are taken, as memory of the model that ends with it.
    """

    def __init__(self, scratch: ScratchArena) -> None:
        self._scratch = scratch
        self._slabs: list[Bytes] = []
        self._free: list[tuple[int, int, int]] = []
        """Slab, start and stop of every gap, in order; no two of them touch."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Gaps to be: finalizers run at any moment, also while the others are looked through."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contents undefined. Raises OutOfMemory."""
        count = math.prod(shape)
        size = max(1, -(-count * dtype.itemsize // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        slab, start = self._take(size)
        place = self._slabs[slab][start : start + size]
        # The tensor refers to the array, and nobody else does.
        gap = (slab, start, start + size)
        weakref.finalize(place, self._returned.append, gap).atexit = False
        return torch.from_numpy(place)[: count * dtype.itemsize].view(dtype).view(tuple(shape))

    def _take(self, size: int) -> tuple[int, int]:
        while self._returned:
            self._give_back(*self._returned.popleft())
        for position, (slab, start, stop) in enumerate(self._free):
            if stop - start >= size:
                rest = [(slab, start + size, stop)] if stop - start > size else []
                self._free[position : position + 1] = rest
                return slab, start
        slab_bytes = max(size, SLAB_BYTES)
        taken = self._scratch.take(Lifetime.MODEL, "capture", (slab_bytes,), torch.uint8)
        self._slabs.append(taken.numpy())
        self._free.append((len(self._slabs) - 1, 0, slab_bytes))
        return self._take(size)

    def _give_back(self, slab: int, start: int, stop: int) -> None:
        insort(self._free, (slab, start, stop))
        position = self._free.index((slab, start, stop))
        for left in (position, position - 1):
            if 0 <= left < len(self._free) - 1:
                (slab, start, touching), (other, begins, stop) = self._free[left : left + 2]
                if slab == other and touching == begins:
                    self._free[left : left + 2] = [(slab, start, stop)]


class Recorder:
    """Collects the parts of one program, native ones and calls of Python, in order."""

    def __init__(self, engine: Engine, memory: ProgramMemory) -> None:
        """From now until `end` the engine records and does not compute."""
        self._engine = engine
        self.parts: list[Callable[[], None]] = []
        engine.recorded_outputs = memory
        self._native = self._begin_native()

    def _begin_native(self) -> "_NativePart":
        part = _NativePart(self._engine)
        self.parts.append(part)
        self._engine.library.polychip_record(self._engine.address, part.address)
        return part

    def add_call(
        self, call: Callable[..., None], *tensors: torch.Tensor, native: NativeForm
    ) -> None:
        """`call` with the bytes of the tensors, whose places others may have before and after."""
        borrowed = [_borrowed(tensor) for tensor in tensors]
        native_call = native(*borrowed)
        if native_call is not None:
            self._native.add_call(native_call)
            return
        self.parts.append(partial(call, *borrowed))
        self._native = self._begin_native()

    def end(self) -> None:
        """The engine computes again."""
        self._engine.recorded_outputs = None
        self._engine.library.polychip_record(self._engine.address, None)


class RecordedProgram(CapturedProgram):
    """Keeps what the function refers to: that is what the recorded operations work on."""

    def __init__(self, parts: Sequence[Callable[[], None]], function: Callable[[], None]) -> None:
        self._parts = tuple(parts)
        self._function = function

    @override
    def replay(self) -> None:
        """Computes it; returns when it is done. Raises what a call in it raises."""
        for part in self._parts:
            part()


class _NativePart:
    """Native operations and calls one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: list[NativeCall] = []
        self._run = engine.library.polychip_program_run
        self.address: int = engine.library.polychip_program_make()
        free = engine.library.polychip_program_free
        weakref.finalize(self, free, self.address).atexit = False

    def add_call(self, call: NativeCall) -> None:
        self._calls.append(call)
        self._engine.library.polychip_program_call(self.address, call.function, call.context)

    def __call__(self) -> None:
        try:
            made = self._run(self._engine.address, self.address, 0)
            while made >= 0:
                self._calls[made - 1].finish()
                made = self._run(self._engine.address, self.address, made)
        except BaseException:
            # Also an interrupt, that rises wherever it likes.
            for call in self._calls:
                call.abandon()
            raise


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes, without keeping them."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_and_strides)
    span_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    found = (c_char * span_bytes).from_address(tensor.data_ptr())
    flat = torch.from_numpy(np.frombuffer(memoryview(found), np.uint8)).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
