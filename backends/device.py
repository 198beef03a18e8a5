"""Device contract: memory and order of work on one chip."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from typing_extensions import override

from backends.arena import Arena, WholeArena
from backends.native_call import NativeForm, no_native_form
from backends.plugin import ChipDescription
from backends.scratch import Lifetime, ScratchArena
from backends.weight_form import WeightForm


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of memory on the chip."""

    total_bytes: int
    free_bytes: int
    shared: bool = False
    """Others take of the same memory: what is free changes without this process' doing."""


@runtime_checkable
class Matrix(Protocol):
    """A weight [N, K] in the form that the chip's kernels read: a tensor, or what only they open.

    Made by `Device.allocate_matrix`; belongs to the caller.
    """

    @property
    def shape(self) -> Sequence[int]:
        """Rows and columns."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers as they are read, and of what it is multiplied with."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes on the chip."""


class Fence(ABC):
    """A point in a chip's work: "after this, what was asked before may be read"."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until the point is reached. Raises DeviceHung after `timeout_s`."""


class ReachedFence(Fence):
    """The fence of a chip that finishes each call before it returns."""

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """Returns at once."""


class CapturedProgram(ABC):
    """A recorded piece of work that can be run again on the same buffers."""

    @abstractmethod
    def replay(self) -> None:
        """Runs the recorded work; asynchronous where the chip is."""


class EagerProgram(CapturedProgram):
    """The default: calls the Python function again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    @override
    def replay(self) -> None:
        """Calls the function."""
        self._function()


class Device(ABC):
    """One open chip. Required: `allocate`, `copy`; the rest has defaults.

    Tensors a device returns belong to the caller; the device keeps no reference.
    """

    def __init__(self, chip: ChipDescription) -> None:
        self.chip = chip
        self._scratch = ScratchArena(self)

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the chip, contents undefined. Raises OutOfMemory naming size and use.

        Its owner may drop it while work that was asked for still uses it: the memory must not be
        given away before that work is done.
        """

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies between host and chip or on the chip; ordered like any other work of the chip."""

    def copy_each(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies many small tensors, each to its own target; default: one by one."""
        for source, target in zip(sources, targets, strict=True):
            self.copy(source, target)

    @property
    def weight_forms(self) -> frozenset[WeightForm]:
        """What `allocate_matrix` can make and `write_blocks` take; default: plain ones."""
        return frozenset({WeightForm.PLAIN})

    def allocate_matrix(
        self, shape: Sequence[int], dtype: torch.dtype, form: WeightForm = WeightForm.PLAIN
    ) -> Matrix:
        """A weight of `shape` [N, K], contents undefined, for `write_rows` to fill.

        form: one of `weight_forms`. Matrices that a step reads one after the other are allocated in
        that order. Default: a tensor. Raises OutOfMemory.
        """
        assert form is WeightForm.PLAIN, f"this chip has no matrices of {form}"
        return self.allocate(shape, dtype)

    def matrix_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, form: WeightForm = WeightForm.PLAIN
    ) -> int:
        """What `allocate_matrix` will take of the chip."""
        assert form is WeightForm.PLAIN, f"this chip has no matrices of {form}"
        return math.prod(shape) * dtype.itemsize

    def write_rows(self, matrix: Matrix, first: int, rows: torch.Tensor) -> None:
        """Puts host rows [n, K] of the matrix's dtype into it, from row `first` on.

        Into a matrix of the form Q8_0 rows of any floating dtype, which are rounded; none into one
        of 4 bits.
        """
        assert isinstance(matrix, torch.Tensor), "who makes matrices of another kind writes them"
        self.copy(rows, matrix[first : first + len(rows)])

    def write_blocks(
        self, matrix: Matrix, first: int, blocks: torch.Tensor, form: WeightForm
    ) -> None:
        """Puts rows of a file's blocks into a matrix from row `first` on.

        blocks [n, form.row_bytes(K)] uint8, on the host; K is a multiple of a block's columns. The
        matrix is of their form, one of `weight_forms`, or plain: then it gets the numbers they
        stand for, rounded to its dtype.
        """
        raise NotImplementedError("a chip that knows no form of blocks takes none")

    def read_rows(self, matrix: Matrix, rows: Sequence[int]) -> torch.Tensor:
        """Some rows of it [n, K] on the host: what it computes with, rounded to its dtype."""
        assert isinstance(matrix, torch.Tensor), "who makes matrices of another kind reads them"
        if isinstance(rows, range):
            return self.to_host(matrix[rows.start : rows.stop : rows.step])
        found = [self.to_host(matrix[row : row + 1]) for row in rows]
        return torch.cat(found or [torch.empty((0, matrix.shape[1]), dtype=matrix.dtype)])

    def to_matrix(self, rows: torch.Tensor) -> Matrix:
        """The host tensor [N, K] as a matrix on the chip. Raises OutOfMemory."""
        matrix = self.allocate_matrix(rows.shape, rows.dtype)
        self.write_rows(matrix, 0, rows)
        return matrix

    def allocate_arena(self, block_bytes: int, blocks: int, segment_blocks: int) -> Arena:
        """One address range of `blocks` blocks, in segments of `segment_blocks`; the caller's.

        block_bytes: a multiple of `Capabilities.block_alignment_bytes`; block 0 starts at such a
        multiple too. Default: one allocation whose segments cannot be given back alone. Raises
        OutOfMemory.
        """
        return WholeArena(self.allocate((blocks, block_bytes), torch.uint8), segment_blocks)

    @property
    def scratch(self) -> ScratchArena:
        """Where the worker and kernels take workspace that outlives a call.

        What kernels return is the backend's to allocate and belongs to the caller; the index
        tensors of a step are placed by the memory pool.
        """
        return self._scratch

    def reclaim(self, lifetime: Lifetime) -> None:  # noqa: B027 - optional
        """A lifetime of scratch ended: frees what the chip's own kernels keep per shape.

        Called by `scratch.reclaim`, in order with kernels; default: nothing is kept.
        """

    def to_chip(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the chip. Raises OutOfMemory."""
        target = self.allocate(tensor.shape, tensor.dtype)
        self.copy(tensor, target)
        return target

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of a chip tensor; returns when the copy is readable."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.copy(tensor, target)
        self.synchronize()
        return target

    def fence(self) -> Fence:
        """A fence behind all work asked so far."""
        return ReachedFence()

    def synchronize(self) -> None:
        """Blocks the host until all work asked so far is done."""
        self.fence().wait()

    def capture(self, function: Callable[[], None]) -> CapturedProgram:
        """Records `function`, which works on fixed buffers, for replay; default: run eagerly."""
        return EagerProgram(function)

    @property
    def captures_steps(self) -> bool:
        """Whether a step of a model can be captured: what changes is found in the bound cache."""
        return False

    def in_order(
        self,
        call: Callable[..., None],
        *tensors: torch.Tensor,
        native: NativeForm = no_native_form,  # noqa: ARG002 - for devices that capture
    ) -> None:
        """Calls what is no kernel, such as a collective, on tensors of the chip.

        Within a capture it is recorded: called at every replay, with the same bytes. native: gives
        what a program may call in its place, without Python.
        """
        call(*tensors)

    def stream_name(self) -> str:
        """The stream that work goes to now, for records; empty where there is but one."""
        return ""

    def memory_info(self) -> MemoryInfo:
        """Total and free bytes; default: what was enumerated, nothing used."""
        return MemoryInfo(self.chip.memory_bytes, self.chip.memory_bytes)

    def close(self) -> None:  # noqa: B027 - optional
        """Gives the chip back; called once."""
