"""When a simulated chip carries out what it was asked for, and how its host waits for it.

Work is carried out as late as the rules allow ("latest": when somebody waits for it), as early
("earliest"), or at seeded random moments in between. A program that orders its work rightly has
the same results under all three; one that forgot a synchronization reads old bytes or poison under
"latest". Simulated times are the same under all three.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from backends.errors import (
    BackendError,
    DeviceError,
    DeviceHung,
    DeviceLost,
    UnsupportedOperation,
)
from backends.simulator.clock import Clock
from backends.simulator.profile import Profile
from backends.simulator.statistics import Recorder
from backends.simulator.streams import ChipFence, Event, Operation, Stream

Execution = Literal["latest", "earliest", "random"]


class Engine:
    """The streams of one chip. Calls are safe from several threads; a fabric's chips share a lock.

    clock: the time of the host thread that drives the chip.
    """

    def __init__(
        self, profile: Profile, index: int, clock: Clock, seed: int, execution: Execution
    ) -> None:
        self.profile = profile
        self.index = index
        self.clock = clock
        self.execution = execution
        self.lock = threading.Condition()
        self.lost: DeviceLost | None = None
        self.recorder = Recorder()
        self.default_stream = Stream(self, 0)
        self._streams = [self.default_stream]
        self._retired: set[Stream] = set()
        self._chance = random.Random(f"{seed} {index}")
        self._asked_count = 0
        self._reports: list[BackendError] = []
        # How many pending operations use the memory at an address.
        self._users: dict[int, int] = {}

    # ------------------------------------------------------------ order

    def stream(self) -> Stream:
        """A new stream beside the default one."""
        with self.lock:
            self._forget_retired()
            self._streams.append(Stream(self, self._streams[-1].index + 1))
            return self._streams[-1]

    def retire(self, stream: Stream) -> None:
        """The stream is asked for nothing more; fences stop covering it once it is done."""
        with self.lock:
            self._retired.add(stream)
            self._forget_retired()

    def record(self, stream: Stream | None = None) -> Event:
        """An event behind all that was asked of the stream so far."""
        return Event(self.mark("event", stream or self.default_stream))

    def wait_event(self, stream: Stream, event: Event) -> None:
        """What is asked of the stream from now on runs after the event."""
        self.mark("wait_event", stream, (event.mark,))

    def query(self, operation: Operation) -> bool:
        """Whether the operation is done, as the profile's events tell."""
        self.clock.advance(self.profile.query_s.value)
        if self.profile.event_query.value == "unsupported":
            raise UnsupportedOperation(
                f"{self.profile.name} cannot query events; wait for a fence instead"
            )
        return self.profile.event_query.value == "always_true" or self.is_done(operation)

    def is_done(self, operation: Operation) -> bool:
        """Whether the operation is done by the clock; carries it out if that is possible."""
        with self.lock:
            return self.advance(operation) is None and operation.end_s <= self.clock.now_s

    def fence(self) -> ChipFence:
        """A fence behind all work so far, in the streams that the profile's fences cover.

        Kernels asked for after it see the copies from the host before it.
        """
        with self.lock:
            self.check_alive()
            covered = self._streams
            if self.profile.synchronize_covers.value == "default_stream":
                covered = [self.default_stream]
            # Carried out in this order: who waited for nobody should not find it done by luck.
            latest_first = sorted(covered, key=lambda stream: -stream.asked_count)
            return ChipFence(self, [self._fence_mark(stream) for stream in latest_first])

    def synchronize(self, stream: Stream | None = None, timeout_s: float | None = None) -> None:
        """Blocks the host until a stream's work is done, or all that a fence covers."""
        if stream is None:
            self.fence().wait(timeout_s)
        else:
            self.reach([self._fence_mark(stream)], timeout_s)

    @property
    def in_flight(self) -> int:
        """Operations asked for and not carried out, marks of events and fences included."""
        return sum(len(stream.pending) for stream in self._streams)

    # ------------------------------------------------------------ asking

    def operation(
        self, name: str, function: Callable[[], None] | None, seconds: float, stream: Stream | None
    ) -> Operation:
        """An operation to be enqueued; the host has spent the time of a launch on it."""
        self.check_alive()
        self.clock.advance(self.profile.launch_s.value)
        return Operation(name, stream or self.default_stream, function, seconds, self.clock.now_s)

    def enqueue(self, operation: Operation) -> None:
        """Puts an operation at the end of its stream."""
        with self.lock:
            if operation.kind != "mark":
                self._asked_count += 1
                operation.stream.asked_count = self._asked_count
            operation.stream.pending.append(operation)
            for address in operation.regions:
                self._users[address] = self._users.get(address, 0) + 1
            if self.execution == "earliest":
                self.run_ready()
            elif self.execution == "random":
                self._run_by_chance()

    def mark(
        self,
        name: str,
        stream: Stream,
        after: Sequence[Operation] = (),
        function: Callable[[], None] | None = None,
    ) -> Operation:
        """Enqueues an operation that takes no time."""
        with self.lock:
            self.check_alive()
            mark = Operation(name, stream, function, 0.0, self.clock.now_s, "mark", tuple(after))
            self.enqueue(mark)
            return mark

    def limit_queue(self, stream: Stream) -> None:
        """Has the host wait for a stream's oldest operation if the stream is full."""
        if len(stream.pending) > self.profile.queue_depth.value:
            self.reach([stream.pending[0]])

    def users_of(self, address: int) -> list[Operation]:
        """Pending operations that use the memory at an address."""
        if address not in self._users:
            return []
        return [
            operation
            for stream in self._streams
            for operation in stream.pending
            if address in operation.regions
        ]

    # ------------------------------------------------------------ carrying out

    def reach(self, targets: Sequence[Operation], timeout_s: float | None = None) -> None:
        """Blocks the host until all targets are done.

        Raises DeviceHung after `timeout_s`, DeviceLost if the chip broke, and once whatever else
        its work ran into since the last time.
        """
        asked_s = self.clock.now_s
        limit_s = None if timeout_s is None else asked_s + timeout_s
        for target in targets:
            while not self._advance_or_block(target, limit_s):
                pass
        ready_s = max((target.end_s for target in targets), default=asked_s)
        if limit_s is not None and ready_s > limit_s and self.lost is None:
            self.clock.wait_until(limit_s)
            raise DeviceHung(f"chip {self.index} is not done after {timeout_s} s")
        self.clock.wait_until(ready_s)
        self.recorder.host_wait_s += self.clock.now_s - asked_s
        with self.lock:
            self.check_alive()
            if self._reports:
                raise self._reports.pop(0)

    def advance(self, target: Operation) -> Operation | None:
        """Carries out a stream up to `target`; the operation that cannot go on, if one cannot."""
        stream = target.stream
        if stream.advancing:
            # Reached again through another chip or stream: whoever began goes on with it.
            return None if target.done else target
        stream.advancing = True
        try:
            while not target.done:
                blocker = self._carry_out(stream.pending[0])
                if blocker is not None:
                    return blocker
        finally:
            stream.advancing = False
        return None

    def complete(
        self,
        operation: Operation,
        start_s: float,
        end_s: float,
        error: BackendError | None = None,
        *,
        report: bool = True,
    ) -> None:
        """Records that the head of a stream is done; the next host wait reports its error."""
        operation.finish(start_s, end_s, error)
        for address in operation.regions:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
        self.recorder.ran(operation.kind, start_s, end_s)
        if error is not None and report:
            self.report(error)

    def report(self, error: BackendError) -> None:
        """Has the next host wait raise an error."""
        self._reports.append(error)

    def _advance_or_block(self, target: Operation, limit_s: float | None) -> bool:
        with self.lock:
            blocker = self.advance(target)
            if blocker is None:
                return True
            if blocker.rendezvous is not None:
                blocker.rendezvous.block(blocker, limit_s)
                return False
        assert blocker.fault == "hang", f"{blocker.name} cannot go on, and nobody knows why"
        raise self.hung(blocker.name, limit_s)

    def _carry_out(self, operation: Operation) -> Operation | None:
        for earlier in operation.after:
            blocker = None if earlier.done else earlier.stream.chip.advance(earlier)
            if blocker is not None:
                return blocker
        if operation.done:
            return None
        if operation.rendezvous is not None and operation.fault != "error":
            return None if operation.rendezvous.arrive(operation) else operation
        if operation.fault == "hang":
            return operation
        start_s = operation.ready_s()
        error = self._failure(operation)
        if error is None:
            self.complete(operation, start_s, start_s + operation.seconds)
        elif self.profile.sticky_errors.value:
            self.lose(error)
        else:
            self.complete(operation, start_s, start_s + operation.seconds, error)
        return None

    def _failure(self, operation: Operation) -> DeviceError | None:
        if operation.fault == "error":
            return DeviceError(f"chip {self.index}: {operation.name} failed: scripted fault")
        if operation.function is None:
            return None
        try:
            operation.function()
        except (IndexError, RuntimeError) as problem:
            # What torch refuses, such as poison as an index, a chip meets as an illegal access.
            error = DeviceError(f"chip {self.index}: {operation.name} failed: {problem}")
            error.__cause__ = problem
            return error
        return None

    def run_ready(self) -> None:
        """Carries out all that can be, without waiting for other chips."""
        for stream in self._streams:
            if stream.pending and not stream.advancing:
                self.advance(stream.pending[-1])

    def _run_by_chance(self) -> None:
        while self._chance.random() < 0.5:
            ready = [stream for stream in self._streams if stream.pending and not stream.advancing]
            if not ready:
                return
            self.advance(self._chance.choice(ready).pending[0])

    # ------------------------------------------------------------ faults

    def check_alive(self) -> None:
        """Raises DeviceLost if the chip broke."""
        if self.lost is not None:
            raise DeviceLost(*self.lost.args) from self.lost.__cause__

    def lose(self, error: DeviceError) -> None:
        """Every later call fails; what was asked for is never carried out."""
        with self.lock:
            self.lost = DeviceLost(f"{error}; every later call of the chip fails, start it anew")
            self.lost.__cause__ = error
            for stream in self._streams:
                while stream.pending:
                    now_s = max(stream.busy_until_s, self.clock.now_s)
                    self.complete(stream.pending[0], now_s, now_s)
            # Chips that wait for this one look again.
            self.lock.notify_all()

    def hung(self, name: str, limit_s: float | None) -> DeviceHung:
        """The error of a hang, at `limit_s` of the clock; without one, if waiting costs nothing."""
        if limit_s is None:
            self.clock.wait_forever()
        else:
            self.clock.wait_until(limit_s)
        return DeviceHung(f"chip {self.index} hangs at {name}; restart it")

    def _fence_mark(self, stream: Stream) -> Operation:
        return self.mark("fence", stream, function=stream.show_copies)

    def _forget_retired(self) -> None:
        done = {stream for stream in self._retired if not stream.pending}
        self._retired -= done
        self._streams = [stream for stream in self._streams if stream not in done]
