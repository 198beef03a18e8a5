"""The communicator contract over a fabric: one rank's view of its group of simulated chips."""

import threading

import torch
from typing_extensions import override

from backends.communicator import Communicator, Work
from backends.errors import CommunicatorError, CommunicatorTimeout, DeviceHung
from backends.simulator.chip import SimulatedChip
from backends.simulator.exchange import Call
from backends.simulator.group import Group
from backends.simulator.streams import Event, Operation


class FabricWork(Work):
    """One rank's part of a collective."""

    def __init__(self, group: Group, chip: SimulatedChip, operation: Operation) -> None:
        self._group = group
        self._chip = chip
        self._operation = operation

    @override
    def wait_stream(self) -> None:
        self._chip.wait_event(self._chip.default_stream, Event(self._operation))

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._chip.reach([self._operation], timeout_s)
        except DeviceHung as late:
            if not self._operation.done:
                raise
            raise CommunicatorTimeout(
                f"{self._operation.name} is not done after {timeout_s} s"
            ) from late
        if self._operation.error is not None:
            raise self._operation.error

    @override
    def done(self) -> bool:
        self._chip.clock.advance(self._chip.profile.query_s.value)
        if self._chip.is_done(self._operation):
            return True
        self._group.notice(self._operation)
        return self._chip.is_done(self._operation)

    @override
    def exception(self) -> CommunicatorError | None:
        error = self._operation.error
        return error if isinstance(error, CommunicatorError) else None


class FabricCommunicator(Communicator):
    """One rank. Its collectives run on a stream of their own, behind the chip's default stream."""

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__(rank, group.world_size)
        self._group = group
        self._chip = group.members[rank].chip
        self._stream = self._chip.stream()
        self._is_proven = False

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._ask(Call("all_reduce", tensor, tensor))

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        return self._ask(Call("all_gather", tensor, output))

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        return self._ask(Call("reduce_scatter", tensor, output))

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._ask(Call("broadcast", tensor, tensor, root=root))

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        self._check_peer(peer)
        return self._ask(Call("send", tensor, tensor, peer=peer))

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        self._check_peer(peer)
        return self._ask(Call("receive", tensor, tensor, peer=peer))

    @override
    def abort(self) -> None:
        """Ends the group for every rank, what is pending included."""
        self._group.fail(CommunicatorError(f"aborted by rank {self.rank}"))

    @override
    def close(self) -> None:
        """The other ranks' next collective with this one fails; what was asked still happens."""
        self._group.leave(self.rank)
        self._chip.retire(self._stream)

    def _check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise CommunicatorError(
                f"rank {self.rank} of {self.world_size} cannot exchange with rank {peer}"
            )

    def _ask(self, call: Call) -> Work:
        for tensor in (call.tensor, call.output):
            assert tensor.is_contiguous(), f"strides {tensor.stride()} are not contiguous"
        if not self._is_proven:
            self._chip.pass_stage("probe_collective", self._group.deadline_s)
            self._is_proven = True
        operation = self._group.ask(self.rank, call, self._stream, threading.current_thread())
        work = FabricWork(self._group, self._chip, operation)
        if self._chip.profile.blocking_collectives.value:
            work.wait()
        return work
