"""Fuses small messages of a communicator inside `group()`, for any backend.

    with communicator.group():          recorded, then at the end, or at the first wait:
        all_reduce(a)  2 KB    ─┐
        all_reduce(b)  2 KB    ─┴──▶    one all_reduce of 4 KB
        all_gather(c)  1 KB    ────▶    all_gather
        all_reduce(d)  9 MB    ────▶    all_reduce, as it is

What is fused follows from the program alone, never from time, so all ranks fuse alike. Inside a
group every rank must therefore also wait at the same places.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from typing_extensions import override

from backends.checked import CheckedCommunicator
from backends.communicator import (
    FUSED_BYTES_MAX,
    Communicator,
    ForwardingCommunicator,
    Work,
)
from backends.device import Device
from backends.errors import CommunicatorError
from backends.fused_run import FusedMessage, FusedRun, PackBuffers
from backends.fusion_plan import BETWEEN_TWO, Operation, PlannedRun, Shape, plan
from backends.packing import ALIGNMENT_BYTES

BUFFER_BYTES = 1 << 20
PLANS_MAX = 256
"""Plans are forgotten when there are more: shapes change with the rows of a step."""


def compose(raw: Communicator, device: Device, checked: bool) -> Communicator:
    """The communicator a worker computes with, over the one a backend made; owns `raw`.

    checked: every call is compared between the ranks first; all ranks must choose alike.
    """
    if raw.world_size == 1:
        return raw
    called = CheckedCommunicator(raw, device) if checked else raw
    message_bytes_max = min(FUSED_BYTES_MAX, raw.fused_bytes_max)
    return FusedCommunicator(called, device, message_bytes_max) if message_bytes_max else called


class FusedCommunicator(ForwardingCommunicator):
    """Outside a group every call goes straight to `inner`, which it owns.

    message_bytes_max: larger messages go as they are. buffer_bytes: most bytes of messages, with
    their outputs, that travel as one; buffers come from the device's scratch when first needed.
    """

    def __init__(
        self,
        inner: Communicator,
        device: Device,
        message_bytes_max: int = FUSED_BYTES_MAX,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        super().__init__(inner)
        self._message_bytes_max = message_bytes_max
        # Between a packed input and output lies a gap of less than the alignment.
        self._run_bytes_max = buffer_bytes - ALIGNMENT_BYTES
        self._buffers = PackBuffers(device, buffer_bytes)
        self._plans: dict[tuple[Shape, ...], list[PlannedRun]] = {}
        self._depth = 0
        self._recorded: list[FusedMessage] = []
        self._submitted: list[FusedRun] = []
        """In this group."""

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if self._depth == 0:
            return self._inner.all_reduce(tensor)
        return self._record(Operation.ALL_REDUCE, tensor, tensor)

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        if self._depth == 0:
            return self._inner.all_gather(tensor, output)
        return self._record(Operation.ALL_GATHER, tensor, output)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        if self._depth == 0:
            return self._inner.reduce_scatter(tensor, output)
        return self._record(Operation.REDUCE_SCATTER, tensor, output)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if self._depth == 0:
            return self._inner.broadcast(tensor, root)
        return self._record(Operation.BROADCAST, tensor, tensor, root)

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        if self._depth == 0:
            return self._inner.send(tensor, peer)
        return self._record(Operation.SEND, tensor, tensor, peer)

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        if self._depth == 0:
            return self._inner.receive(tensor, peer)
        return self._record(Operation.RECEIVE, tensor, tensor, peer)

    @override
    @contextmanager
    def group(self) -> Iterator[None]:
        """A group inside a group is part of it; an error that leaves it drops what is recorded."""
        self._depth += 1
        try:
            yield
            if self._depth == 1:
                self.flush()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._drop("its group ended with an error")
                self._submitted.clear()

    @override
    def close(self) -> None:
        self._drop("the communicator is closed")
        super().close()

    def flush(self) -> None:
        """Submits what is recorded, in order.

        Raises what `inner` raises; what was not submitted by then has failed with it.
        """
        recorded, self._recorded = self._recorded, []
        try:
            self._submit(recorded)
        except CommunicatorError as error:
            for message in recorded:
                if message.run is None:
                    message.error = error
            raise

    def _submit(self, recorded: list[FusedMessage]) -> None:
        for part in _apart_where_used_again(recorded):
            self._settle_collectives()
            for planned in self._plan(part):
                messages = [part[position] for position in planned.positions]
                run = FusedRun(planned, messages, self._buffers)
                run.start(self._inner)
                self._submitted.append(run)

    def _record(
        self, operation: Operation, tensor: torch.Tensor, output: torch.Tensor, rank: int = -1
    ) -> Work:
        assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} is not contiguous"
        assert output.is_contiguous(), f"an output of strides {output.stride()} is not contiguous"
        message = FusedMessage(self.flush, operation, rank, tensor, output)
        self._recorded.append(message)
        return message

    def _plan(self, messages: Sequence[FusedMessage]) -> list[PlannedRun]:
        shapes = tuple([message.shape() for message in messages])
        found = self._plans.get(shapes)
        if found is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            found = plan(shapes, self._message_bytes_max, self._run_bytes_max)
            self._plans[shapes] = found
        return found

    def _settle_collectives(self) -> None:
        """What follows in the group may read or write what they wrote.

        Only of collectives: every rank is here at once, and so nobody waits in vain.
        """
        for run in self._submitted:
            if run.planned.operation not in BETWEEN_TWO:
                run.settle()
        self._submitted.clear()

    def _drop(self, why: str) -> None:
        for message in self._recorded:
            message.error = CommunicatorError(f"dropped: {why}")
        self._recorded.clear()


def _apart_where_used_again(messages: list[FusedMessage]) -> list[list[FusedMessage]]:
    """Cuts before each collective that reads or writes the bytes of an earlier one in its part.

    Messages between two ranks are left out: the other ranks do not hear of them, and must cut
    alike.
    """
    used: list[tuple[int, int]] = []
    for message in messages:
        if message.operation not in BETWEEN_TWO:
            used += message.addresses()
    used.sort()
    if all(before[1] <= after[0] for before, after in pairwise(used)):
        return [messages]
    parts: list[list[FusedMessage]] = [[]]
    used.clear()
    for message in messages:
        if message.operation not in BETWEEN_TWO:
            addresses = message.addresses()
            if _overlap(used, addresses):
                parts.append([])
                used.clear()
            used += addresses
        parts[-1].append(message)
    return parts


def _overlap(used: Sequence[tuple[int, int]], addresses: Sequence[tuple[int, int]]) -> bool:
    return any(
        start < used_stop and used_start < stop
        for start, stop in addresses
        for used_start, used_stop in used
    )
