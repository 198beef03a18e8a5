"""Sums of a group, recorded one by one and submitted in one call; see docs/collectives.md."""

from contextlib import AbstractContextManager
from types import TracebackType

import torch
from typing_extensions import override

from backends.communicator import Work
from backends.cpu.shared_memory_end import SharedMemoryEnd
from backends.cpu.shared_memory_library import Kind
from backends.cpu.shared_memory_work import (
    NOT_SUBMITTED,
    SharedMemoryWork,
    code_of,
    submitted,
)
from backends.errors import CommunicatorError


class SumGroup(AbstractContextManager[None]):
    """A group of a communicator; one inside another is part of it.

    depth: groups that are open; while there is one, sums are to be recorded. An error that leaves
    the outermost drops them.
    """

    def __init__(self, end: SharedMemoryEnd) -> None:
        self.depth = 0
        self._end = end
        self._recorded: _GroupedSums | None = None

    @override
    def __enter__(self) -> None:
        self.depth += 1

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.depth -= 1
        if self.depth:
            return
        if kind is None:
            self.flush()
        else:
            self.drop("its group ended with an error")

    def add(self, tensor: torch.Tensor) -> Work:
        """Records a sum. The work is that of all its neighbours of one dtype."""
        # What is done here is done for each of many small sums, so no more is asked.
        assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} is not contiguous"
        sums = self._recorded
        if sums is None or tensor.dtype is not sums.dtype:
            sums = self._begin(tensor.dtype)
        sums.tensors.append(tensor)
        return sums

    def _begin(self, dtype: torch.dtype) -> "_GroupedSums":
        code = code_of(Kind.ALL_REDUCE, dtype, -1)
        self.flush()
        self._recorded = _GroupedSums(self, self._end, code, dtype)
        return self._recorded

    def flush(self) -> None:
        """Submits what is recorded. Raises CommunicatorError, with which that has failed, too."""
        sums, self._recorded = self._recorded, None
        if sums is not None:
            sums.submit()

    def drop(self, why: str) -> None:
        """Submits nothing of what is recorded."""
        sums, self._recorded = self._recorded, None
        if sums is not None:
            sums.fail(f"dropped: {why}")


class _GroupedSums(SharedMemoryWork):
    """Neighbours in a group, which share their fate. A wait inside the group submits them first."""

    __slots__ = ("_code", "_error", "_group", "_waited_for", "dtype", "tensors")

    def __init__(
        self, group: SumGroup, end: SharedMemoryEnd, code: int, dtype: torch.dtype
    ) -> None:
        super().__init__(end, Kind.ALL_REDUCE, NOT_SUBMITTED)
        self.dtype = dtype
        self.tensors: list[torch.Tensor] = []
        self._group = group
        self._code = code
        self._waited_for = False
        self._error: CommunicatorError | None = None

    def submit(self) -> None:
        """Raises CommunicatorError; its waits then raise the same."""
        tensors, self.tensors = self.tensors, []
        number = self._end.submit_sums(self._code, tensors)
        try:
            self._number = submitted(Kind.ALL_REDUCE, number)
        except CommunicatorError as error:
            self.fail(str(error))
            raise

    def fail(self, why: str) -> None:
        """It was not submitted, and never will be."""
        self.tensors = []
        self._error = CommunicatorError(why)

    @override
    def wait_stream(self) -> None:
        if not self._waited_for:
            self.wait()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        if self._waited_for:
            return
        if self._number == NOT_SUBMITTED:
            if self._error is None:
                self._group.flush()
            if self._number == NOT_SUBMITTED:
                raise self._error or CommunicatorError("dropped: its submission was interrupted")
        super().wait(timeout_s)
        self._waited_for = True

    @override
    def done(self) -> bool:
        """False until it is submitted; asking does not submit it."""
        if self._number == NOT_SUBMITTED:
            return self._error is not None
        return super().done()

    @override
    def exception(self) -> CommunicatorError | None:
        return self._error if self._number == NOT_SUBMITTED else super().exception()
