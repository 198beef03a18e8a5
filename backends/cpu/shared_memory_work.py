"""An operation under way, and what is asked of the native code for it."""

import time
import zlib
from functools import cache

import torch
from typing_extensions import override

from backends.communicator import Work
from backends.cpu.shared_memory_end import SharedMemoryEnd
from backends.cpu.shared_memory_library import (
    SUM_NONE,
    SUM_TYPES,
    Kind,
    Status,
    operation_code,
)
from backends.errors import CommunicatorError

NOT_SUBMITTED = 0
"""No operation has this number."""


class SharedMemoryWork(Work):
    """An operation under way. Any wait moves on all operations of its communicator."""

    __slots__ = ("_end", "_kind", "_number")

    def __init__(self, end: SharedMemoryEnd, kind: Kind, number: int) -> None:
        self._end = end
        self._kind = kind
        self._number = number

    @override
    def wait_stream(self) -> None:
        """The host itself is what works after the collective, so it waits."""
        self.wait()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """After a timeout, as after any failure, the communicator is broken."""
        if self._end.finished(self._number):
            return
        status = self._end.wait(self._number, timeout_s)
        if status is Status.INTERRUPTED:
            status = self._wait_on(timeout_s)
        if status is Status.FAILED:
            raise self._end.failure(self._kind.name.lower())

    def _wait_on(self, timeout_s: float | None) -> Status:
        """A signal ended the wait. Python has handled it by now, and did not raise."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        status = Status.INTERRUPTED
        while status is Status.INTERRUPTED:
            left_s = None if give_up is None else give_up - time.monotonic()
            status = self._end.wait(self._number, left_s)
        return status

    @override
    def done(self) -> bool:
        """True once it finished, well or not."""
        return self._end.finished(self._number) or self._end.poll(self._number) is not (
            Status.PENDING
        )

    @override
    def exception(self) -> CommunicatorError | None:
        if self._end.finished(self._number) or self._end.poll(self._number) is not Status.FAILED:
            return None
        return self._end.failure(self._kind.name.lower())


def submitted(kind: Kind, number: int) -> int:
    """The number of an operation that was submitted. Raises CommunicatorError if it was refused."""
    if number == NOT_SUBMITTED:
        raise CommunicatorError(f"{kind.name.lower()}: the communicator is closed or broken")
    return number


def check_memory(tensor: torch.Tensor) -> None:
    """The native code takes its address and its bytes."""
    assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} is not contiguous"
    assert tensor.is_cpu, f"a tensor on {tensor.device} is not in main memory"


@cache
def code_of(kind: Kind, dtype: torch.dtype, peer: int) -> int:
    """What the native code takes for it. Raises CommunicatorError if the dtype has no sum."""
    sum_type = SUM_TYPES.get(dtype, SUM_NONE)
    if sum_type == SUM_NONE and kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        names = ", ".join(str(known).removeprefix("torch.") for known in SUM_TYPES)
        raise CommunicatorError(f"{dtype} cannot be summed; dtypes that can: {names}")
    # A number for the dtype that is the same on all ranks.
    return operation_code(kind, sum_type, peer, zlib.crc32(str(dtype).encode()))
