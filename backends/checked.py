"""Compares what the ranks are about to call before they call it; for debugging.

    collective   every rank's fingerprint is gathered on every rank, then the operation runs
    send         fingerprint, then message, to the same peer
    receive      fingerprint, compared with what is awaited, then message

A mistake is then told in words, on every rank, where it would be a hang or a wrong sum. One kind
is not seen before the deadline: a rank that sends while others call a collective.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from typing_extensions import override

from backends.communicator import Communicator, ForwardingCommunicator, Work
from backends.device import Device
from backends.errors import CommunicatorError, CommunicatorMisuse
from backends.fingerprint import FIELDS_COUNT, Fingerprint, difference


def require_alike(
    communicator: Communicator, device: Device, checked: bool, deadline_s: float
) -> None:
    """All ranks of a group check, or none: one that differs would take a fingerprint for a result.

    Every rank of a new group must call it, before anything is checked. Raises CommunicatorMisuse on
    each rank if they differ.
    """
    own = device.to_chip(torch.tensor([checked], dtype=torch.int64))
    every = device.allocate((communicator.world_size, 1), torch.int64)
    communicator.all_gather(own, every).wait(deadline_s)
    flags = device.to_host(every).flatten().tolist()
    if any(flags) and not all(flags):
        having = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        raise CommunicatorMisuse(
            f"--debug-backend is given to some ranks of the group only: of {len(flags)}, to rank "
            f"{having}; start all workers of a group with it, or none"
        )


class CheckedCommunicator(ForwardingCommunicator):
    """Each call costs a small one more, and waits for the others; owns `inner`.

    Raises CommunicatorMisuse, naming what each side called; all ranks of a group must check, or
    none.
    """

    def __init__(self, inner: Communicator, device: Device) -> None:
        super().__init__(inner)
        self._device = device
        self._own = device.allocate((FIELDS_COUNT,), torch.int64)
        self._every = device.allocate((inner.world_size, FIELDS_COUNT), torch.int64)
        self._collectives_count = 0
        self._sent_counts: defaultdict[int, int] = defaultdict(int)
        self._received_counts: defaultdict[int, int] = defaultdict(int)
        self._awaited: list[_CheckedReceive] = []
        """Receives whose fingerprint has not come, in program order."""

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._compare("all_reduce", tensor)
        return _CheckedWork(self._inner.all_reduce(tensor), self)

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._compare("all_gather", tensor)
        return _CheckedWork(self._inner.all_gather(tensor, output), self)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._compare("reduce_scatter", tensor)
        return _CheckedWork(self._inner.reduce_scatter(tensor, output), self)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._compare("broadcast", tensor, root)
        return _CheckedWork(self._inner.broadcast(tensor, root), self)

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        self.advance_awaited()
        fingerprint = Fingerprint.of(self._sent_counts[peer], "message", tensor)
        self._sent_counts[peer] += 1
        # Its tensor must live as long as the message is under way: the work keeps it.
        on_chip = self._device.to_chip(torch.tensor(fingerprint))
        header = self._inner.send(on_chip, peer)
        return _CheckedSend(header, self._inner.send(tensor, peer), self, on_chip)

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        expected = Fingerprint.of(self._received_counts[peer], "message", tensor)
        self._received_counts[peer] += 1
        work = _CheckedReceive(self, tensor, peer, expected)
        self._awaited.append(work)
        return work

    @override
    def close(self) -> None:
        self._awaited.clear()
        super().close()

    def take_awaited(self) -> None:
        """Receives, in program order, all that was asked for so far; blocks for fingerprints."""
        while self._awaited:
            self._awaited[0].take_message(blocks=True)

    def advance_awaited(self) -> None:
        """Receives in program order as far as it goes without blocking."""
        while self._awaited and self._awaited[0].take_message(blocks=False):
            pass

    def receive_message(self, tensor: torch.Tensor, peer: int) -> Work:
        """The message itself, whose fingerprint was the one awaited first."""
        self._awaited.pop(0)
        return self._inner.receive(tensor, peer)

    def receive_fingerprint(self, peer: int) -> "_ArrivingFingerprint":
        """The fingerprint of the next message of a peer."""
        on_chip = self._device.allocate((FIELDS_COUNT,), torch.int64)
        work = self._inner.receive(on_chip, peer)
        return _ArrivingFingerprint(work, on_chip, self._device.to_host)

    def _compare(self, operation: str, tensor: torch.Tensor, *root: int) -> None:
        self.take_awaited()
        own = Fingerprint.of(self._collectives_count, operation, tensor, *root)
        self._collectives_count += 1
        # Kept until the result is on the host: a chip may read it late.
        on_host = torch.tensor(own)
        self._device.copy(on_host, self._own)
        self._inner.all_gather(self._own, self._every).wait()
        every = [Fingerprint(*row) for row in self._device.to_host(self._every).tolist()]
        if any(found != own for found in every):
            raise CommunicatorMisuse(f"the ranks call different operations; {difference(every)}")


class _ArrivingFingerprint:
    """A fingerprint on its way from a peer."""

    def __init__(
        self, work: Work, on_chip: torch.Tensor, to_host: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.work = work
        self._on_chip = on_chip
        self._to_host = to_host

    def fingerprint(self) -> Fingerprint:
        """Blocks until it is there."""
        self.work.wait()
        return Fingerprint(*self._to_host(self._on_chip).tolist())


class _CheckedWork(Work):
    """A collective; whoever waits for it lets what was to be received before come first."""

    def __init__(self, inner: Work, owner: CheckedCommunicator) -> None:
        self._inner = inner
        self._owner = owner

    @override
    def wait_stream(self) -> None:
        self._owner.take_awaited()
        self._inner.wait_stream()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        self._owner.take_awaited()
        self._inner.wait(timeout_s)

    @override
    def done(self) -> bool:
        return self._inner.done()

    @override
    def exception(self) -> CommunicatorError | None:
        return self._inner.exception()


class _CheckedSend(_CheckedWork):
    """A message that follows its fingerprint, which is kept for as long."""

    def __init__(
        self, header: Work, inner: Work, owner: CheckedCommunicator, fingerprint: torch.Tensor
    ) -> None:
        super().__init__(inner, owner)
        self._header = header
        self._fingerprint = fingerprint

    @override
    def wait_stream(self) -> None:
        super().wait_stream()
        self._header.wait_stream()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        super().wait(timeout_s)
        self._header.wait(timeout_s)


class _CheckedReceive(Work):
    """A message that is asked for only once its fingerprint is there and right."""

    def __init__(
        self,
        owner: CheckedCommunicator,
        tensor: torch.Tensor,
        peer: int,
        expected: Fingerprint,
    ) -> None:
        self._owner = owner
        self._tensor = tensor
        self._peer = peer
        self._expected = expected
        self._arriving: _ArrivingFingerprint | None = None
        self._message: Work | None = None
        self._error: CommunicatorError | None = None

    def take_message(self, blocks: bool) -> bool:
        """Takes fingerprint and message; False if that would block and must not.

        Raises CommunicatorMisuse on the receiving rank only: the sender may have gone on.
        """
        if self._error is not None:
            raise self._error
        if self._arriving is None:
            self._arriving = self._owner.receive_fingerprint(self._peer)
        if not (blocks or self._arriving.work.done()):
            return False
        try:
            sent = self._arriving.fingerprint()
            if sent != self._expected:
                raise CommunicatorMisuse(
                    f"rank {self._peer} sends {sent}; rank {self._owner.rank} awaits "
                    f"{self._expected}"
                )
            self._message = self._owner.receive_message(self._tensor, self._peer)
        except CommunicatorError as error:
            self._error = error
            raise
        return True

    @override
    def wait_stream(self) -> None:
        self._taken().wait_stream()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """The time counts from when the fingerprint is there."""
        self._taken().wait(timeout_s)

    @override
    def done(self) -> bool:
        """Takes what has come so far."""
        if self._message is None and self._error is None:
            try:
                self._owner.advance_awaited()
            except CommunicatorError as error:
                # Of this message or of one before it, without which this one does not come.
                self._error = error
        return self._error is not None or (self._message is not None and self._message.done())

    @override
    def exception(self) -> CommunicatorError | None:
        if self._error is not None or self._message is None:
            return self._error
        return self._message.exception()

    def _taken(self) -> Work:
        if self._message is None:
            self._owner.take_awaited()
        assert self._message is not None
        return self._message
