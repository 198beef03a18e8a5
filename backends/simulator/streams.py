"""Queues of work on a simulated chip: operations, streams, events and fences.

An operation is asked for now and carried out later, in the order of its stream; `chip.py` decides
when. Its times are simulated: they follow from when it was asked for, what it waits for and how
long it takes, never from when the simulator gets round to it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from typing_extensions import override

from backends.device import Fence
from backends.errors import BackendError
from backends.simulator.profile import Profile


class Rendezvous(ABC):
    """What makes an operation wait for other chips."""

    @abstractmethod
    def arrive(self, operation: "Operation") -> bool:
        """The operation heads its stream; True once every chip's part is there and it is done."""

    @abstractmethod
    def block(self, operation: "Operation", limit_s: float | None) -> None:
        """Waits a while for another rank to change something; the chip's lock is held.

        Called where no progress is possible. Fails the collective if none ever will be, or none
        came until `limit_s` of the chip's clock.
        """


class StreamOwner(Protocol):
    """What streams, events and fences ask of their chip."""

    @property
    def profile(self) -> Profile:
        """What kind of chip it is."""

    def advance(self, target: "Operation") -> "Operation | None":
        """Carries out a stream up to `target`; the operation that cannot go on, if one cannot."""

    def record(self, stream: "Stream | None" = None) -> "Event":
        """An event behind all that was asked of the stream so far."""

    def wait_event(self, stream: "Stream", event: "Event") -> None:
        """What is asked of the stream from now on runs after the event."""

    def query(self, operation: "Operation") -> bool:
        """Whether the operation is done, as the chip's events tell."""

    def reach(self, targets: "Sequence[Operation]", timeout_s: float | None = None) -> None:
        """Blocks the host until all targets are done."""


@dataclass(eq=False)
class Operation:
    """One entry of a stream."""

    name: str
    stream: "Stream"
    function: Callable[[], None] | None
    seconds: float
    asked_s: float
    kind: str = "compute"
    after: "tuple[Operation, ...]" = ()
    """Operations of other streams, or other chips, that come first."""
    regions: frozenset[int] = frozenset()
    """Addresses of the memory it reads or writes."""
    rendezvous: Rendezvous | None = None
    fault: str | None = None
    done: bool = False
    start_s: float = 0.0
    end_s: float = 0.0
    error: BackendError | None = None

    def ready_s(self) -> float:
        """The earliest it can start: after what is before it in the stream and in `after`."""
        return max([self.asked_s, self.stream.busy_until_s, *(each.end_s for each in self.after)])

    def finish(self, start_s: float, end_s: float, error: BackendError | None = None) -> None:
        """Takes it off the head of its stream."""
        assert self.stream.pending[0] is self, f"{self.name} ends before what was asked earlier"
        self.stream.pending.popleft()
        self.start_s, self.end_s, self.error = start_s, end_s, error
        self.done = True
        self.stream.busy_until_s = end_s
        # What the function and the predecessors hold may be given back now.
        self.function, self.after = None, ()


@dataclass(eq=False)
class Stream:
    """Operations of a chip that run one after the other; index 0 is the default stream."""

    chip: StreamOwner
    index: int
    pending: deque[Operation] = field(default_factory=deque)
    busy_until_s: float = 0.0
    asked_count: int = 0
    """How many operations the whole chip had been asked for at this stream's latest."""
    advancing: bool = False
    """Somebody up the call stack is carrying it out."""
    unseen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(target, bytes) the copy engine wrote past the cache: kernels see them after a fence."""

    def record(self) -> "Event":
        """An event behind all that was asked of the stream so far."""
        return self.chip.record(self)

    def wait_event(self, event: "Event") -> None:
        """What is asked of the stream from now on runs after the event."""
        self.chip.wait_event(self, event)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Blocks the host until all that was asked of the stream is done; not a fence."""
        self.chip.reach([self.record().mark], timeout_s)

    def show_copies(self) -> None:
        """From here on kernels see what was copied from the host."""
        for target, staged in self.unseen:
            target.copy_(staged)
        self.unseen.clear()


@dataclass(frozen=True, eq=False)
class Event:
    """A point in a stream."""

    mark: Operation

    def query(self) -> bool:
        """Whether the point is reached. Raises UnsupportedOperation where the chip cannot tell.

        A chip whose events are always true answers without looking.
        """
        return self.mark.stream.chip.query(self.mark)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Blocks the host until the point is reached. Raises DeviceHung after `timeout_s`."""
        self.mark.stream.chip.reach([self.mark], timeout_s)

    def elapsed_s(self, later: "Event") -> float:
        """Seconds from this event to a later one, both reached; 0 if the chip times no events."""
        if not self.mark.stream.chip.profile.event_timing.value:
            return 0.0
        assert self.mark.done, "the first event is not reached; synchronize first"
        assert later.mark.done, "the later event is not reached; synchronize first"
        return later.mark.end_s - self.mark.end_s


class ChipFence(Fence):
    """A point behind all work the chip was asked for, in the streams that its fences cover."""

    def __init__(self, chip: StreamOwner, marks: Sequence[Operation]) -> None:
        self._chip = chip
        self._marks = tuple(marks)

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """Raises DeviceHung after `timeout_s`, and whatever the chip's work ran into."""
        self._chip.reach(self._marks, timeout_s)
