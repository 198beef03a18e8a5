"""A set of CPU cores as a device: main memory under a limit, each call done when it returns."""

import math
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from typing_extensions import override

from backends.arena import Arena
from backends.cpu.arena import MappedArena
from backends.cpu.host import CpuChip, host_memory
from backends.cpu.kernel_library import FORMS, Engine, PackedMatrix, packed_bytes
from backends.cpu.program import ProgramMemory, RecordedProgram, Recorder
from backends.device import CapturedProgram, Device, Matrix, MemoryInfo
from backends.errors import BackendUnavailable, OutOfMemory, UnsupportedOperation
from backends.native_call import NativeForm, no_native_form
from backends.scratch import Lifetime
from backends.weight_form import WeightForm

# Below this the operating system is not asked how much memory is left: asking takes longer.
_ASKS_FROM_BYTES = 64 << 20


class CpuDevice(Device):
    """Pins this process to the chip's cores, one torch thread each.

    limit_bytes: most bytes that live tensors and arenas may take; None is what the host has.
    engine: packs weights for the native kernels; None leaves them tensors.
    """

    def __init__(
        self, chip: CpuChip, limit_bytes: int | None, engine: Engine | None = None
    ) -> None:
        super().__init__(chip)
        self._limit_bytes = limit_bytes
        self._engine = engine
        self._used_bytes = 0
        self._program_memory = ProgramMemory(self.scratch)
        self._recorder: Recorder | None = None
        _pin_process(chip.cores)
        torch.set_num_threads(len(chip.cores))

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory pages are taken when they are first written, not here."""
        asked_bytes = math.prod(shape) * dtype.itemsize
        what = f"a tensor of {tuple(shape)}"
        self._take(what, asked_bytes)
        try:
            tensor = torch.empty(tuple(shape), dtype=dtype)
        except RuntimeError as error:
            # torch has no class of its own for a failed allocation of main memory.
            self._give_back(asked_bytes)
            raise self._out_of_memory(what, asked_bytes, str(error)) from error
        # The storage outlives the tensor while any view of it lives.
        weakref.finalize(tensor.untyped_storage(), self._give_back, asked_bytes).atexit = False
        return tensor

    @property
    @override
    def weight_forms(self) -> frozenset[WeightForm]:
        """Those of the native kernels, where there is an engine."""
        return super().weight_forms if self._engine is None else frozenset(FORMS)

    @override
    def allocate_matrix(
        self, shape: Sequence[int], dtype: torch.dtype, form: WeightForm = WeightForm.PLAIN
    ) -> Matrix:
        """Packed where there is an engine, its padding counted."""
        if self._engine is None:
            return super().allocate_matrix(shape, dtype, form)
        what = f"a matrix of {tuple(shape)}"
        asked_bytes = self.matrix_bytes(shape, dtype, form)
        self._take(what, asked_bytes)
        try:
            matrix = PackedMatrix(self._engine, shape, dtype, form)
        except MemoryError as error:
            self._give_back(asked_bytes)
            raise self._out_of_memory(what, asked_bytes, str(error)) from error
        weakref.finalize(matrix, self._give_back, asked_bytes).atexit = False
        return matrix

    @override
    def matrix_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, form: WeightForm = WeightForm.PLAIN
    ) -> int:
        if self._engine is None:
            return super().matrix_bytes(shape, dtype, form)
        return packed_bytes(shape, dtype, form)

    @override
    def write_rows(self, matrix: Matrix, first: int, rows: torch.Tensor) -> None:
        if isinstance(matrix, PackedMatrix):
            matrix.write(first, rows)
        else:
            super().write_rows(matrix, first, rows)

    @override
    def write_blocks(
        self, matrix: Matrix, first: int, blocks: torch.Tensor, form: WeightForm
    ) -> None:
        assert isinstance(matrix, PackedMatrix), "only packed matrices take blocks"
        matrix.write_blocks(first, blocks, form)

    @override
    def read_rows(self, matrix: Matrix, rows: Sequence[int]) -> torch.Tensor:
        if isinstance(matrix, PackedMatrix):
            return matrix.read(torch.tensor(rows, dtype=torch.int64))
        return super().read_rows(matrix, rows)

    @override
    def allocate_arena(self, block_bytes: int, blocks: int, segment_blocks: int) -> Arena:
        """A mapping of its own, so that segments can go back to the system one by one."""
        take = partial(self._take, f"an arena of {blocks} blocks")
        try:
            return MappedArena(blocks, block_bytes, segment_blocks, take, self._give_back)
        except (OSError, OverflowError, ValueError) as error:
            raise self._out_of_memory(
                f"an arena of {blocks} blocks", blocks * block_bytes, str(error)
            ) from error

    def _take(self, what: str, asked_bytes: int) -> None:
        free_bytes = self._free_bytes(asked_bytes)
        if free_bytes is not None and asked_bytes > free_bytes:
            raise self._out_of_memory(what, asked_bytes, f"{free_bytes} bytes are free")
        self._used_bytes += asked_bytes

    def _free_bytes(self, asked_bytes: int) -> int | None:
        if self._limit_bytes is not None:
            return self._limit_bytes - self._used_bytes
        return host_memory().available if asked_bytes >= _ASKS_FROM_BYTES else None

    def _out_of_memory(self, what: str, asked_bytes: int, why: str) -> OutOfMemory:
        limit = "none" if self._limit_bytes is None else f"{self._limit_bytes} bytes"
        return OutOfMemory(
            f"{asked_bytes} bytes asked for {what}; {why}; "
            f"{self._used_bytes} bytes are in use on chip {self.chip.index}, its limit is {limit}"
        )

    def _give_back(self, freed_bytes: int) -> None:
        self._used_bytes -= freed_bytes

    @override
    def reclaim(self, lifetime: Lifetime) -> None:
        """With a model its programs end, whose memory was scratch of it."""
        if lifetime is Lifetime.MODEL:
            self._program_memory = ProgramMemory(self.scratch)

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.in_order(_copy, source, target)

    @property
    @override
    def captures_steps(self) -> bool:
        """With the native kernels."""
        return self._engine is not None

    @override
    def capture(self, function: Callable[[], None]) -> CapturedProgram:
        if self._engine is None:
            return super().capture(function)
        if self._recorder is not None:
            raise UnsupportedOperation("a capture within a capture")
        self._recorder = Recorder(self._engine, self._program_memory)
        try:
            function()
        finally:
            self._recorder.end()
            parts, self._recorder = self._recorder.parts, None
        return RecordedProgram(parts, function)

    @override
    def in_order(
        self,
        call: Callable[..., None],
        *tensors: torch.Tensor,
        native: NativeForm = no_native_form,
    ) -> None:
        if self._recorder is None:
            call(*tensors)
        else:
            self._recorder.add_call(call, *tensors, native=native)

    @override
    def copy_each(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        # One call of torch for all: a small copy costs less than the call.
        torch._foreach_copy_(list(targets), list(sources))

    @override
    def memory_info(self) -> MemoryInfo:
        """The limit and what is left of it; without a limit the host's memory."""
        total, available = host_memory()
        if self._limit_bytes is None:
            return MemoryInfo(total, available, shared=True)
        left_bytes = self._limit_bytes - self._used_bytes
        return MemoryInfo(self._limit_bytes, max(0, min(left_bytes, available)))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _pin_process(cores: tuple[int, ...]) -> None:
    """All threads there are; the system call knows threads only, and later ones inherit."""
    try:
        for thread in Path("/proc/self/task").iterdir():
            # A thread that ended meanwhile needs no core.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
    except OSError as error:
        raise BackendUnavailable(f"cannot pin to cores {cores}: {error}") from error
