"""Collectives of simulated chips: through one fabric in a process, else staged through the host.

ranks meet at a store on rank 0 and say which process they are in
  all in one   -> the fabric of the process: late, exact, with deadlock detection
  several      -> each contribution is fenced, copied to the host, exchanged by gloo, copied back
"""

import secrets
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from typing_extensions import override

from backends.communicator import Communicator, SingleRankCommunicator, Work
from backends.device import Device
from backends.errors import CommunicatorError, DeviceHung
from backends.gloo_rendezvous import GlooRendezvous
from backends.gloo_work import translate_gloo_errors
from backends.interface import GroupPlace
from backends.sim.device import SimDevice
from backends.simulator.chip import SimulatedChip
from backends.simulator.exchange import Call
from backends.simulator.fabric import Fabric
from backends.simulator.fabric_communicator import FabricCommunicator
from backends.simulator.streams import Operation, Rendezvous

FABRIC = Fabric()
"""The links between the chips of this process, as a machine has them once."""
_PROCESS = secrets.token_hex(16)


def in_one_process(place: GroupPlace, rendezvous: GlooRendezvous) -> bool:
    """Whether all ranks of the group are threads of this process; every rank must ask.

    Raises CommunicatorTimeout if one of them does not come to the meeting point.
    """
    store = rendezvous.store
    names = [f"{place.key}/process of rank {rank}" for rank in range(place.world_size)]
    with translate_gloo_errors(f"rank {place.rank} of {place.world_size} joins {place.key!r}"):
        store.set(names[place.rank], _PROCESS)
        store.wait(names, timedelta(seconds=place.join_deadline_s))
        return all(store.get(name) == _PROCESS.encode() for name in names)


def join_fabric(
    device: SimDevice, place: GroupPlace, rendezvous: GlooRendezvous
) -> FabricCommunicator:
    """This rank's end of the fabric, once all ranks are there."""
    group = FABRIC.join(
        device.simulated,
        f"{place.key} at {rendezvous.address!r}",
        place.rank,
        place.world_size,
        join_deadline_s=place.join_deadline_s,
        step_deadline_s=place.step_deadline_s,
    )
    return FabricCommunicator(group, place.rank)


class AloneCommunicator(SingleRankCommunicator):
    """A group of one chip: what is copied is copied in order with the chip's kernels."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._device.copy(tensor, output[0])
        return super().broadcast(tensor, 0)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._device.copy(tensor[0], output)
        return super().broadcast(output, 0)


class StagedCommunicator(Communicator):
    """A chip's collectives over a communicator of host memory.

    Each is work of the chip's default stream as well: it costs its time there and meets the faults
    that are planted at it.
    """

    def __init__(self, device: SimDevice, host: Communicator, deadline_s: float) -> None:
        super().__init__(host.rank, host.world_size)
        self._device = device
        self._chip = device.simulated
        self._host = host
        self._deadline_s = deadline_s
        self._is_proven = False

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        mine = self._contribute(Call("all_reduce", tensor, tensor))
        return self._staged(self._host.all_reduce(mine), mine, tensor)

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        mine = self._contribute(Call("all_gather", tensor, output))
        result = torch.empty(output.shape, dtype=output.dtype)
        return self._staged(self._host.all_gather(mine, result), result, output)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        mine = self._contribute(Call("reduce_scatter", tensor, output))
        result = torch.empty(output.shape, dtype=output.dtype)
        return self._staged(self._host.reduce_scatter(mine, result), result, output)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        mine = self._contribute(Call("broadcast", tensor, tensor, root=root))
        return self._staged(self._host.broadcast(mine, root), mine, tensor)

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._host.send(self._contribute(Call("send", tensor, tensor, peer=peer)), peer)

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        self._ask(Call("receive", tensor, tensor, peer=peer))
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._staged(self._host.receive(result, peer), result, tensor)

    @override
    def abort(self) -> None:
        self._host.abort()

    @override
    def close(self) -> None:
        self._host.close()

    def _contribute(self, call: Call) -> torch.Tensor:
        """The bytes of `call.tensor` behind all work asked so far, on the host."""
        assert call.tensor.is_contiguous(), f"strides {call.tensor.stride()} are not contiguous"
        self._ask(call)
        return self._device.to_host(call.tensor)

    def _ask(self, call: Call) -> None:
        if not self._is_proven:
            self._chip.pass_stage("probe_collective", self._deadline_s)
            self._is_proven = True
        passage = _Passage(self._chip, call.seconds(self._chip.profile))
        tensors = (call.tensor, call.output)
        stream = self._chip.default_stream
        self._chip.enqueue(self._chip.ask_collective(call.operation, passage, tensors, stream))

    def _staged(self, work: Work, result: torch.Tensor, target: torch.Tensor) -> Work:
        staged = StagedWork(work, lambda: self._device.copy(result, target))
        if self._chip.profile.blocking_collectives.value:
            staged.block()
        return staged


class StagedWork(Work):
    """A collective whose result goes to the chip when it is first waited for."""

    def __init__(self, host: Work, deliver: Callable[[], None]) -> None:
        self._host = host
        self._deliver = deliver
        self._lock = threading.Lock()
        self._delivered = False

    def block(self) -> None:
        """Occupies the host until it is done, well or not, as a blocking library does."""
        try:
            self.wait()
        except CommunicatorError:
            # The same error again for whoever waits for the work.
            return

    @override
    def wait_stream(self) -> None:
        """The host itself brings the result, so it waits."""
        self.wait()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        self._host.wait(timeout_s)
        with self._lock:
            if not self._delivered:
                self._deliver()
                self._delivered = True

    @override
    def done(self) -> bool:
        return self._host.done()

    @override
    def exception(self) -> CommunicatorError | None:
        return self._host.exception()


class _Passage(Rendezvous):
    """A chip's part of a staged collective: its time, and the faults planted at it."""

    def __init__(self, chip: SimulatedChip, seconds: float) -> None:
        self._chip = chip
        self._seconds = seconds

    @override
    def arrive(self, operation: Operation) -> bool:
        if operation.fault == "hang":
            return False
        start_s = operation.ready_s()
        self._chip.complete(operation, start_s, start_s + self._seconds)
        return True

    @override
    def block(self, operation: Operation, limit_s: float | None) -> None:
        clock = self._chip.clock
        if limit_s is None:
            clock.wait_forever()
        else:
            clock.wait_until(limit_s)
        raise DeviceHung(f"chip {self._chip.index} hangs at {operation.name}; restart it")
