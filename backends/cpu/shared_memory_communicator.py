"""Collectives between ranks that share memory; see docs/collectives.md."""

import ctypes
from contextlib import AbstractContextManager

import torch
from typing_extensions import override

from backends.communicator import Communicator, Work
from backends.cpu.shared_memory_end import SharedMemoryEnd
from backends.cpu.shared_memory_library import Kind
from backends.cpu.shared_memory_sums import SumGroup
from backends.cpu.shared_memory_work import (
    SharedMemoryWork,
    check_memory,
    code_of,
    submitted,
)
from backends.errors import CommunicatorError
from backends.gloo_rendezvous import GlooRendezvous
from backends.native_call import NativeCall

_MESSAGES = (Kind.SEND, Kind.RECEIVE)
"""What only two ranks take part in: the others submit recorded sums as if it were not there."""


class SharedMemoryCommunicator(Communicator):
    """All operations return before they are done; several may be under way at once.

    In a `group` neighbouring sums of one dtype are submitted in one call, the small ones as one
    message. All else is under way together anyhow.

    An operation must finish within the deadline the end was made with, from its submission.
    """

    def __init__(
        self, end: SharedMemoryEnd, rank: int, world_size: int, rendezvous: GlooRendezvous
    ) -> None:
        super().__init__(rank, world_size)
        self._end = end
        self._sums = SumGroup(end)
        # Kept because on rank 0 the other ranks may still read the verdict from it.
        self._rendezvous: GlooRendezvous | None = rendezvous

    @property
    @override
    def fused_bytes_max(self) -> int:
        """Nothing: packing a small message in Python takes as long as the message."""
        return 0

    @override
    def group(self) -> AbstractContextManager[None]:
        return self._sums

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if self._sums.depth:
            return self._sums.add(tensor)
        return self._submit(Kind.ALL_REDUCE, tensor, tensor, tensor.nbytes)

    @override
    def native_all_reduce(self, tensor: torch.Tensor) -> NativeCall | None:
        check_memory(tensor)
        code = code_of(Kind.ALL_REDUCE, tensor.dtype, -1)
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
        check_memory(source)
        if target is not source:
            check_memory(target)
        code = code_of(kind, source.dtype, peer)
        if self._sums.depth and kind not in _MESSAGES:
            self._sums.flush()
        number = self._end.submit(code, source, target, part_bytes)
        return SharedMemoryWork(self._end, kind, submitted(kind, number))

    @override
    def abort(self) -> None:
        """Ends pending waits at once; the other ranks lose this one."""
        self._rendezvous = None
        self._end.abort()

    @override
    def close(self) -> None:
        self._sums.drop("the communicator is closed")
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
        number = submitted(Kind.ALL_REDUCE, self._call.number)
        SharedMemoryWork(self._end, Kind.ALL_REDUCE, number).wait()

    @override
    def abandon(self) -> None:
        """One that is under way breaks the communicator: the other ranks wait for it in vain."""
        if not self._end.finished(self._call.number):
            self._end.abort()
