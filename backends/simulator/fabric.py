"""The links between simulated chips of one process: who is in which group, and who waits for whom.

Each rank runs in a thread of its own. Where every rank that could help another one is waiting
itself, none can go on, and all of them are told at once instead of at their deadlines.
"""

import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from backends.errors import CommunicatorError, CommunicatorTimeout
from backends.simulator.chip import SimulatedChip
from backends.simulator.group import LOOK_AGAIN_S, Group, Meeting, Member, WaitingRoom


class SimDeadlock(CommunicatorError):
    """Every rank waits for another one, and none can go on."""

    retryable = False


class Fabric(WaitingRoom):
    """All groups of the process. real: monotonic seconds, for ranks that simply never come."""

    def __init__(self, real: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.Condition()
        self._real = real
        self._forming: dict[str, Group] = {}
        self._version = 0
        # What each thread waits for, and how much had happened when it last found nothing to do.
        self._waiting: dict[threading.Thread, tuple[Meeting, int]] = {}

    def link(self, chips: Sequence[SimulatedChip], deadline_s: float) -> Group:
        """A group of these chips in rank order, without anybody waiting."""
        group = Group(self, len(chips), deadline_s)
        for rank, chip in enumerate(chips):
            self._add(group, rank, chip)
        return group

    def join(
        self,
        chip: SimulatedChip,
        key: str,
        rank: int,
        world_size: int,
        *,
        join_deadline_s: float,
        step_deadline_s: float,
    ) -> Group:
        """Waits for the other ranks with the same key. Raises CommunicatorTimeout without them."""
        with self.lock:
            group = self._forming.setdefault(key, Group(self, world_size, step_deadline_s))
            if group.world_size != world_size or rank in group.members:
                raise CommunicatorError(
                    f"rank {rank} of {world_size} cannot join {key!r}, a group of "
                    f"{group.world_size} with ranks {sorted(group.members)}"
                )
            self._add(group, rank, chip)
            if group.is_complete:
                del self._forming[key]
            self.changed()
            self.lock.wait_for(
                lambda: group.is_complete or group.error is not None, join_deadline_s
            )
            if not group.is_complete:
                self._forming.pop(key, None)
                group.fail(
                    CommunicatorTimeout(
                        f"{key!r}: only ranks {sorted(group.members)} of {world_size} joined "
                        f"within {join_deadline_s} s"
                    )
                )
            group.check(rank)
            return group

    @override
    def changed(self) -> None:
        self._version += 1
        self.lock.notify_all()

    @override
    def real_s(self) -> float:
        return self._real()

    @override
    def wait(self, meeting: Meeting, rank: int, seconds: float) -> None:
        thread = threading.current_thread()
        meeting.group.members[rank].thread = thread
        self._waiting[thread] = (meeting, self._version)
        try:
            stuck = self._stuck(meeting)
            if stuck:
                self._tell(stuck)
            else:
                self.lock.wait(min(seconds, LOOK_AGAIN_S))
        finally:
            del self._waiting[thread]

    def _add(self, group: Group, rank: int, chip: SimulatedChip) -> None:
        # Chips that meet share a lock, so that one thread can carry out the work of another.
        with self.lock, chip.lock:
            chip.lock = self.lock
            group.members[rank] = Member(chip, threading.current_thread())

    def _stuck(self, meeting: Meeting) -> list[Meeting]:
        """All meetings that wait for one another, if no thread concerned can do anything."""
        found = [meeting]
        for each in found:
            for member in each.missing():
                waiting = self._waiting.get(member.thread)
                if waiting is None or waiting[1] != self._version:
                    return []
                if waiting[0] not in found:
                    found.append(waiting[0])
        return found

    def _tell(self, stuck: Sequence[Meeting]) -> None:
        waits = "; ".join(sorted({meeting.describe() for meeting in stuck}))
        for group in {meeting.group for meeting in stuck}:
            group.fail(SimDeadlock(f"every rank waits and none can go on: {waits}"))
