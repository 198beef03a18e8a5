"""Simulated chips that exchange: their collectives and messages, matched by sequence number.

    ask on every rank -> heads a stream: arrive, bytes are read -> all arrived: arithmetic, done

A rank's part is carried out in the order of its stream, by whichever thread gets there; a rank that
waits carries out what the others were already asked for.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from threading import Condition, Thread

import torch
from typing_extensions import override

from backends.errors import CommunicatorError, CommunicatorMisuse, CommunicatorTimeout, PeerLost
from backends.simulator.chip import SimulatedChip
from backends.simulator.exchange import MESSAGES, Call, exchange
from backends.simulator.streams import Operation, Rendezvous, Stream

# How long a thread sleeps before it looks again by itself; changes wake it sooner.
LOOK_AGAIN_S = 0.05


class WaitingRoom(ABC):
    """Where ranks wait for one another; its lock is held in every call."""

    lock: Condition

    @abstractmethod
    def changed(self) -> None:
        """Something happened that may let a waiting rank go on."""

    @abstractmethod
    def wait(self, meeting: "Meeting", rank: int, seconds: float) -> None:
        """Sleeps until something changes; fails the groups concerned where nothing can."""

    @abstractmethod
    def real_s(self) -> float:
        """Monotonic real seconds."""


@dataclass(eq=False)
class Member:
    """One rank of a group: its chip, and how far it has counted."""

    chip: SimulatedChip
    thread: Thread
    """The thread that drives it, as last seen."""
    left: bool = False
    told: bool = False
    """It has been told of the group's error."""
    collectives: int = 0
    messages: "Counter[tuple[int, int]]" = field(default_factory=Counter)


class Group:
    """The ranks that exchange under one key. An operation that fails ends it for all of them."""

    def __init__(self, room: WaitingRoom, world_size: int, deadline_s: float) -> None:
        self.room = room
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.members: dict[int, Member] = {}
        self.error: CommunicatorError | None = None
        self._meetings: dict[tuple[int, ...], Meeting] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every rank has joined."""
        return len(self.members) == self.world_size

    def ask(self, rank: int, call: Call, stream: Stream, thread: Thread) -> Operation:
        """Asks rank's chip for its part. Raises the group's error, or CommunicatorMisuse."""
        with self.room.lock:
            member = self.members[rank]
            member.thread = thread
            self.check(rank)
            key, ranks = self._place(rank, call)
            meeting = self._meetings.setdefault(key, Meeting(self, key, ranks))
            meeting.compare(rank, call)
            self.check(rank)
            chip = member.chip
            operation = chip.ask_collective(
                call.operation, meeting, (call.tensor, call.output), stream
            )
            meeting.calls[rank] = call
            meeting.operations[rank] = operation
            self.room.changed()
            chip.enqueue(operation)
            return operation

    def notice(self, operation: Operation) -> None:
        """Fails the group if a rank's pending operation cannot be done any more."""
        with self.room.lock:
            meeting = operation.rendezvous
            if isinstance(meeting, Meeting) and not operation.done:
                meeting.notice(operation)

    def leave(self, rank: int) -> None:
        """The rank asks for nothing more; the others' next collective with it fails."""
        with self.room.lock:
            self.members[rank].left = True
            self.room.changed()

    def fail(self, error: CommunicatorError) -> None:
        """Ends the group: pending operations and later ones fail with the first error."""
        with self.room.lock:
            self.error = self.error or error
            self.room.changed()

    def check(self, rank: int) -> None:
        """Raises the group's error."""
        if self.error is not None:
            self.members[rank].told = True
            raise self.copied_error()

    def copied_error(self) -> CommunicatorError:
        """The group's error anew: one exception cannot be raised in several threads."""
        assert self.error is not None
        return type(self.error)(*self.error.args)

    def over(self, meeting: "Meeting") -> None:
        """Forgets a meeting that is done."""
        self._meetings.pop(meeting.key, None)

    def _place(self, rank: int, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The key of a call's meeting, and its ranks."""
        member = self.members[rank]
        if call.operation not in MESSAGES:
            member.collectives += 1
            return (member.collectives,), tuple(range(self.world_size))
        source, target = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
        member.messages[source, target] += 1
        return (source, target, member.messages[source, target]), (source, target)


class Meeting(Rendezvous):
    """One collective, or one message with its sender and its receiver."""

    def __init__(self, group: Group, key: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        self.group = group
        self.key = key
        self.ranks = ranks
        self.calls: dict[int, Call] = {}
        self.operations: dict[int, Operation] = {}
        self._brought: dict[int, torch.Tensor] = {}
        self._is_finished = False
        self._ready_s = 0.0
        self._blocked_since_s: dict[int, float] = {}

    def compare(self, rank: int, call: Call) -> None:
        """Ends the group if the rank asks for something else than the others."""
        for other, theirs in self.calls.items():
            if theirs.fingerprint != call.fingerprint:
                self.group.fail(
                    CommunicatorMisuse(
                        f"the ranks' calls differ at {self.describe()}: rank {other} asked for "
                        f"{theirs.fingerprint}, rank {rank} for {call.fingerprint} (operation, "
                        "dtype, elements, root); all ranks make the same calls in the same order"
                    )
                )

    def missing(self) -> list[Member]:
        """The ranks whose part has not arrived."""
        return [self.group.members[rank] for rank in self.ranks if rank not in self._brought]

    def describe(self) -> str:
        """For people: which one it is, who is there and who is not."""
        names = "/".join(sorted({call.operation for call in self.calls.values()}))
        absent = [rank for rank in self.ranks if rank not in self._brought]
        if len(self.key) == 1:
            return f"{names} number {self.key[0]}, which ranks {absent} have not reached"
        source, target, number = self.key
        return f"{names} number {number} from {source} to {target}, not reached by {absent}"

    # ------------------------------------------------------------ carrying out

    @override
    def arrive(self, operation: Operation) -> bool:
        rank = self._rank_of(operation)
        if self.group.error is not None:
            self._give_up(rank, operation)
            return True
        if operation.fault == "hang":
            return False
        if rank not in self._brought:
            self._bring(rank, operation)
        for peer in self.ranks:
            theirs = self.operations.get(peer)
            if theirs is not None and peer not in self._brought:
                theirs.stream.chip.advance(theirs)
        if not self._is_finished and len(self._brought) == len(self.ranks):
            self._finish()
        return operation.done

    def _bring(self, rank: int, operation: Operation) -> None:
        call, chip = self.calls[rank], self.group.members[rank].chip
        self._brought[rank] = call.tensor.clone()
        ready_s = operation.ready_s()
        if call.operation == "send" and not chip.profile.blocking_collectives.value:
            # The message is on its way; the sender does not wait for the receiver.
            end_s = ready_s + call.seconds(chip.profile)
            chip.complete(operation, ready_s, end_s)
            self._ready_s = max(self._ready_s, end_s - call.seconds(chip.profile))
            return
        self._ready_s = max(self._ready_s, ready_s)

    def _finish(self) -> None:
        if len(self.key) == 1:
            exchange(self.calls, self._brought)
        else:
            source, target = self.ranks
            self.calls[target].output.copy_(self._brought[source])
        seconds = max(
            call.seconds(self.group.members[rank].chip.profile) for rank, call in self.calls.items()
        )
        for rank, operation in self.operations.items():
            if not operation.done:
                chip = self.group.members[rank].chip
                chip.complete(operation, self._ready_s, self._ready_s + seconds)
        self._is_finished = True
        self.group.over(self)
        self.group.room.changed()

    def _give_up(self, rank: int, operation: Operation) -> None:
        member = self.group.members[rank]
        now_s = max(operation.ready_s(), member.chip.clock.now_s)
        member.chip.complete(
            operation, now_s, now_s, self.group.copied_error(), report=not member.told
        )
        member.told = True
        self.group.over(self)

    def _rank_of(self, operation: Operation) -> int:
        return next(rank for rank, each in self.operations.items() if each is operation)

    # ------------------------------------------------------------ waiting

    def notice(self, operation: Operation, limit_s: float | None = None) -> float:
        """Fails the group if a part will never come, or did not by its deadline.

        Returns the seconds that are left otherwise; does not wait.
        """
        rank = self._rank_of(operation)
        gone = self._gone()
        if gone is not None:
            self.group.fail(PeerLost(f"rank {rank} waits at {self.describe()}: {gone}"))
        clock = self.group.members[rank].chip.clock
        until_s = operation.asked_s + self.group.deadline_s
        until_s = until_s if limit_s is None else min(until_s, limit_s)
        left_s = until_s - clock.now_s
        if not clock.is_paced:
            # Simulated time stands still while the others compute, so real time is what passes.
            now_s = self.group.room.real_s()
            left_s -= now_s - self._blocked_since_s.setdefault(rank, now_s)
        if left_s <= 0 or (self._hangs() and not clock.is_paced):
            clock.wait_until(until_s)
            self.group.fail(CommunicatorTimeout(f"rank {rank} waited in vain: {self.describe()}"))
        return left_s

    @override
    def block(self, operation: Operation, limit_s: float | None) -> None:
        left_s = self.notice(operation, limit_s)
        if operation.done or self.group.error is not None:
            return
        if self._hangs():
            self.group.room.lock.wait(min(left_s, LOOK_AGAIN_S))
        else:
            self.group.room.wait(self, self._rank_of(operation), left_s)

    def _gone(self) -> str | None:
        """Why a part will never come because its rank is gone."""
        for rank in self.ranks:
            member = self.group.members[rank]
            if rank in self._brought:
                continue
            if member.chip.lost is not None:
                return f"rank {rank} is lost ({member.chip.lost})"
            if rank not in self.operations:
                if member.left:
                    return f"rank {rank} has left"
            elif self.operations[rank].done:
                return f"rank {rank} failed ({self.operations[rank].error})"
        return None

    def _hangs(self) -> bool:
        """Whether a part will never come because its chip hangs before it, or at it."""
        for rank, operation in self.operations.items():
            if rank not in self._brought:
                blocker = operation.stream.chip.advance(operation)
                if blocker is not None and blocker.fault == "hang":
                    return True
        return False
