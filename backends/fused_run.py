"""Calls recorded in a group, and the runs they travel in: their submission, waits and results."""

from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from backends.communicator import Communicator, Work
from backends.device import Device
from backends.errors import CommunicatorError
from backends.fusion_plan import Operation, PlannedRun, Shape
from backends.packing import PackBuffer, PackedLayout

Addresses = tuple[tuple[int, int], ...]


class FusedMessage(Work):
    """A call recorded in a group.

    flush: submits what is recorded, this call among it.
    """

    __slots__ = ("_flush", "error", "operation", "output", "rank", "run", "tensor")

    def __init__(
        self,
        flush: Callable[[], None],
        operation: Operation,
        rank: int,
        tensor: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self._flush = flush
        self.operation = operation
        self.rank = rank
        self.tensor = tensor
        self.output = output
        self.run: FusedRun | None = None
        self.error: CommunicatorError | None = None

    def shape(self) -> Shape:
        """What a plan sees of it."""
        tensor = self.tensor
        return Shape(self.operation, self.rank, tensor.dtype, tensor.shape, self.output.shape)

    def addresses(self) -> Addresses:
        """First byte, and the one behind the last, of each tensor."""
        start = self.tensor.data_ptr()
        own = (start, start + self.tensor.nbytes)
        if self.output is self.tensor:
            return (own,)
        start = self.output.data_ptr()
        return (own, (start, start + self.output.nbytes))

    @override
    def wait_stream(self) -> None:
        """Inside the group it submits what is recorded first."""
        run = self.run or self._started_run()
        if not run.settled:
            run.settle()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """Inside the group it submits what is recorded first."""
        (self.run or self._started_run()).wait(timeout_s)

    @override
    def done(self) -> bool:
        """False until it is submitted; asking does not submit it."""
        if self.run is None:
            return self.error is not None
        return self.run.work.done()

    @override
    def exception(self) -> CommunicatorError | None:
        return self.error if self.run is None else self.run.work.exception()

    def _started_run(self) -> "FusedRun":
        if self.error is None:
            self._flush()
        if self.run is None:
            raise self.error or CommunicatorError("dropped: an earlier call of its group failed")
        return self.run


class FusedRun:
    """Messages that travel as one and share their fate; a message alone goes as it is."""

    def __init__(
        self, planned: PlannedRun, messages: Sequence[FusedMessage], buffers: "PackBuffers"
    ) -> None:
        self.planned = planned
        self.settled = False
        self._messages = messages
        self._buffers = buffers
        self._work: Work | None = None
        self._layout: PackedLayout | None = None

    def start(self, inner: Communicator) -> None:
        """Submits the run. Raises what `inner` raises."""
        tensor, output = self._messages[0].tensor, self._messages[0].output
        if len(self._messages) > 1:
            layout = self._layout = self._buffers.lend(self).layout(self.planned, inner.rank)
            tensor, output = layout.tensor, layout.output
            if layout.sources:
                tensors = [message.tensor for message in self._messages]
                self._buffers.device.copy_each(tensors, layout.sources)
        self._work = submit(inner, self.planned, tensor, output)
        for message in self._messages:
            message.run = self

    def settle(self) -> None:
        """Orders the chip's work behind it and copies the results to their tensors, once."""
        if not self.settled:
            self.work.wait_stream()
            self._copy_out()
            self.settled = True

    def settle_if_done(self) -> None:
        """Does not block; leaves a run alone that failed."""
        if self.work.done() and self.work.exception() is None:
            self.settle()

    def wait(self, timeout_s: float | None) -> None:
        """Blocks the host until the results are in their tensors."""
        self.work.wait(timeout_s)
        self.settle()
        if len(self._messages) > 1:
            self._buffers.device.fence().wait(timeout_s)

    @property
    def work(self) -> Work:
        """The run's own; there is one once it was started."""
        assert self._work is not None
        return self._work

    def _copy_out(self) -> None:
        layout, self._layout = self._layout, None
        if layout is None:
            return
        if layout.targets:
            outputs = [message.output for message in self._messages]
            self._buffers.device.copy_each(layout.targets, outputs)
        self._buffers.take_back(self)


class PackBuffers:
    """The buffers of a communicator, of one size, taken from the device's scratch when needed."""

    def __init__(self, device: Device, buffer_bytes: int) -> None:
        self.device = device
        self._buffer_bytes = buffer_bytes
        self._idle: list[PackBuffer] = []
        self._lent: dict[FusedRun, PackBuffer] = {}

    def lend(self, run: FusedRun) -> PackBuffer:
        """A buffer for a run to be carried in, until `take_back`."""
        if not self._idle:
            # Those of messages nobody waits for, as may be with those sent.
            for carried in list(self._lent):
                if carried is not run:
                    carried.settle_if_done()
        buffer = self._idle.pop() if self._idle else PackBuffer(self.device, self._buffer_bytes)
        self._lent[run] = buffer
        return buffer

    def take_back(self, run: FusedRun) -> None:
        """What was copied out of a buffer is ordered before what is copied into it next."""
        self._idle.append(self._lent.pop(run))


def submit(
    communicator: Communicator, planned: PlannedRun, tensor: torch.Tensor, output: torch.Tensor
) -> Work:
    """Calls a run's operation; `output` is `tensor` where it works in place."""
    match planned.operation:
        case Operation.ALL_REDUCE:
            return communicator.all_reduce(tensor)
        case Operation.ALL_GATHER:
            return communicator.all_gather(tensor, output)
        case Operation.REDUCE_SCATTER:
            return communicator.reduce_scatter(tensor, output)
        case Operation.BROADCAST:
            return communicator.broadcast(tensor, planned.rank)
        case Operation.SEND:
            return communicator.send(tensor, planned.rank)
        case Operation.RECEIVE:
            return communicator.receive(tensor, planned.rank)
