"""Collectives between ranks that share memory; see docs/collectives.md."""

import ctypes
import time
import zlib
from functools import cache

import torch
from typing_extensions import override

from backends.communicator import Communicator, Work
from backends.cpu.shared_memory_end import SharedMemoryEnd
from backends.cpu.shared_memory_library import (
    SUM_NONE,
    SUM_TYPES,
    Kind,
    Status,
    operation_code,
)
from backends.errors import CommunicatorError
from backends.gloo_rendezvous import GlooRendezvous
from backends.native_call import NativeCall


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


class SharedMemoryCommunicator(Communicator):
    """All operations return before they are done; several may be under way at once.

    `group` does nothing: what is asked for inside is under way together anyhow, and packing small
    messages in Python takes longer than each of them.

    An operation must finish within the deadline the end was made with, from its submission.
    """

    def __init__(
        self, end: SharedMemoryEnd, rank: int, world_size: int, rendezvous: GlooRendezvous
    ) -> None:
        super().__init__(rank, world_size)
        self._end = end
        # Kept because on rank 0 the other ranks may still read the verdict from it.
        self._rendezvous: GlooRendezvous | None = rendezvous

    @property
    @override
    def fused_bytes_max(self) -> int:
        """Nothing: a small message takes some 5 us here, packing and unpacking one as long."""
        return 0

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._submit(Kind.ALL_REDUCE, tensor, tensor, tensor.nbytes)

    @override
    def native_all_reduce(self, tensor: torch.Tensor) -> NativeCall | None:
        _check_memory(tensor)
        code = _operation_code(Kind.ALL_REDUCE, tensor.dtype, -1)
        return _NativeAllReduce(self._end, code, tensor)

    @property
    @override
    def native_calls_ns(self) -> int:
        return self._end.called_ns

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._check_parts("output", output, tensor)
        return self._submit(Kind.ALL_GATHER, tensor, output, tensor.nbytes)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._check_parts("tensor", tensor, output)
        return self._submit(Kind.REDUCE_SCATTER, tensor, output, output.nbytes)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if not 0 <= root < self.world_size:
            raise CommunicatorError(f"rank {root} is none of the {self.world_size} ranks")
        return self._submit(Kind.BROADCAST, tensor, tensor, tensor.nbytes, root)

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """What fits into the ring to that rank is sent at once, the rest as the rank receives."""
        self._check_peer(peer)
        return self._submit(Kind.SEND, tensor, tensor, tensor.nbytes, peer)

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        self._check_peer(peer)
        return self._submit(Kind.RECEIVE, tensor, tensor, tensor.nbytes, peer)

    def _check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise CommunicatorError(
                f"rank {self.rank} of {self.world_size} cannot exchange with rank {peer}"
            )

    def _check_parts(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """The native code would write past the end."""
        assert whole.dtype == part.dtype, f"{name} is {whole.dtype}, the other one {part.dtype}"
        assert whole.numel() == self.world_size * part.numel(), (
            f"{name} is {tuple(whole.shape)}, not {self.world_size} times {tuple(part.shape)}"
        )

    def _submit(
        self,
        kind: Kind,
        source: torch.Tensor,
        target: torch.Tensor,
        part_bytes: int,
        peer: int = -1,
    ) -> Work:
        _check_memory(source)
        if target is not source:
            _check_memory(target)
        code = _operation_code(kind, source.dtype, peer)
        return _work(self._end, kind, self._end.submit(code, source, target, part_bytes))

    @override
    def abort(self) -> None:
        """Ends pending waits at once; the other ranks lose this one."""
        self._rendezvous = None
        self._end.abort()

    @override
    def close(self) -> None:
        self._rendezvous = None
        self._end.leave()


class _NativeAllReduce(NativeCall):
    """Keeps the end: the native communicator is there for as long as a program may call it."""

    def __init__(self, end: SharedMemoryEnd, code: int, tensor: torch.Tensor) -> None:
        self._end = end
        self._call = end.repeated_call(code, tensor, tensor, tensor.nbytes)
        self.function = end.call_function
        self.context = ctypes.addressof(self._call)

    @override
    def finish(self) -> None:
        """It failed, or a signal ended the wait."""
        _work(self._end, Kind.ALL_REDUCE, self._call.number).wait()

    @override
    def abandon(self) -> None:
        """One that is under way breaks the communicator: the other ranks wait for it in vain."""
        if not self._end.finished(self._call.number):
            self._end.abort()


def _work(end: SharedMemoryEnd, kind: Kind, number: int) -> Work:
    """Of an operation that was submitted. number: 0 if it was refused."""
    if number == 0:
        raise CommunicatorError(f"{kind.name.lower()}: the communicator is closed or broken")
    return SharedMemoryWork(end, kind, number)


def _check_memory(tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} is not contiguous"
    assert tensor.is_cpu, f"a tensor on {tensor.device} is not in main memory"


@cache
def _operation_code(kind: Kind, dtype: torch.dtype, peer: int) -> int:
    """What the native code takes for it. Raises CommunicatorError if the dtype has no sum."""
    sum_type = SUM_TYPES.get(dtype, SUM_NONE)
    if sum_type == SUM_NONE and kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        names = ", ".join(str(known).removeprefix("torch.") for known in SUM_TYPES)
        raise CommunicatorError(f"{dtype} cannot be summed; dtypes that can: {names}")
    # A number for the dtype that is the same on all ranks.
    return operation_code(kind, sum_type, peer, zlib.crc32(str(dtype).encode()))
