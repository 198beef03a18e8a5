"""Communicator contract: collectives between the ranks of a group.

Every operation returns a `Work`; order is program order, one FIFO per communicator. All ranks call
the same operations in the same order. An operation that fails leaves the communicator unusable: the
epoch is over.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from typing_extensions import override

from backends.errors import CommunicatorError
from backends.native_call import NativeCall

FUSED_BYTES_MAX = 64 << 10
"""Where a message costs some tens of microseconds and a gigabyte a tenth of a second."""


class Work(ABC):
    """A submitted collective. The tensors given to it may be used again once it is waited for."""

    @abstractmethod
    def wait_stream(self) -> None:
        """Work asked of the chip from now on runs after the collective; the host does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until it is done. Raises PeerLost or CommunicatorTimeout."""

    @abstractmethod
    def done(self) -> bool:
        """True once it finished, well or not; never blocks."""

    @abstractmethod
    def exception(self) -> CommunicatorError | None:
        """What it failed with; None while running or after success."""


class FinishedWork(Work):
    """The work of a communicator that finishes each call before it returns."""

    @override
    def wait_stream(self) -> None:
        """Nothing is left to wait for."""

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing is left to wait for."""

    @override
    def done(self) -> bool:
        """Always."""
        return True

    @override
    def exception(self) -> CommunicatorError | None:
        """Never: the call itself raised."""
        return None


class Communicator(ABC):
    """The collectives of one group for one epoch.

    Tensors are contiguous and on this rank's chip; results are bit-identical on every rank.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Sums over the ranks, in place."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        """output[r] becomes rank r's tensor; output is [world_size, *tensor.shape]."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        """output becomes the sum over ranks of their tensor[rank]; tensor is [world_size, ...]."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Every rank's tensor becomes root's, in place."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """Sends to one rank, which must receive."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        """Receives from one rank, in place."""

    def native_all_reduce(self, tensor: torch.Tensor) -> NativeCall | None:  # noqa: ARG002
        """`all_reduce` of this tensor and the wait for it, for a captured program.

        Default: None, it is called from Python.
        """
        return None

    @property
    def native_calls_ns(self) -> int:
        """How long such calls took so far, all together."""
        return 0

    @property
    def fused_bytes_max(self) -> int:
        """The largest message that costs less packed together with others than on its own.

        0 where a message of its own costs less, or where the communicator itself packs those of a
        group. Alike on every rank.
        """
        return FUSED_BYTES_MAX

    def group(self) -> AbstractContextManager[None]:
        """Operations inside may be fused by dtype and operation; flushed at exit, in program order.

        As outside, a tensor may be used again once its operation is waited for. Every rank must
        wait at the same places inside; a wait for a message between two ranks submits what else was
        recorded on some backends only. Default: nothing is fused.
        """
        return nullcontext()

    def abort(self) -> None:  # noqa: B027 - optional
        """Makes pending operations fail soon, from any thread; default: at their deadline."""

    def close(self) -> None:  # noqa: B027 - optional
        """Ends the communicator; does not wait for other ranks."""


class ForwardingCommunicator(Communicator):
    """Adds something to the six operations of `inner`, which it owns; the rest it passes on."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner

    @property
    @override
    def fused_bytes_max(self) -> int:
        return self._inner.fused_bytes_max

    @override
    def group(self) -> AbstractContextManager[None]:
        return self._inner.group()

    @override
    def abort(self) -> None:
        self._inner.abort()

    @override
    def close(self) -> None:
        self._inner.close()


class SingleRankCommunicator(Communicator):
    """The communicator of a group of one chip: every operation is its own result."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """The sum of one rank is the tensor."""
        return FinishedWork()

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        """Copies the tensor."""
        output[0].copy_(tensor)
        return FinishedWork()

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        """Copies the tensor's only part."""
        output.copy_(tensor[0])
        return FinishedWork()

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """The tensor is already root's."""
        return FinishedWork()

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        """There is no peer."""
        raise CommunicatorError(f"rank {peer} does not exist in a group of one")

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        """There is no peer."""
        raise CommunicatorError(f"rank {peer} does not exist in a group of one")
