"""The epochs of chip groups: which workers make up a group, from when it serves, when it ends.

    waiting --members idle--> forming --all ready--> serving
       ^                         |                     |
       '------ a rank lost, faulted, silent or late ---'

The members are all workers of the group, or those that can while the others cannot (`muster`).
What befalls a worker is told by `ChipGroups`; what becomes of the requests, the listener decides.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from control_plane.config import SchedulingConfig
from control_plane.scheduling.group_members import ChipGroup, GroupState, Muster, muster
from control_plane.scheduling.heartbeat_watch import HeartbeatWatch
from control_plane.scheduling.messages import Effect, FormGroup, Log, LogLevel, ResetWorker
from control_plane.scheduling.timers import Timers
from control_plane.scheduling.worker_table import (
    Worker,
    WorkerState,
    WorkerTable,
    worker_log,
)

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""Pause before forming a group again whose last epochs never got to a step."""

GATHER_S = 1.0
"""From the first failure of a rank while its group forms to the end of that epoch: what fails on
one chip often fails on others, and the victim of a fault often speaks before the culprit."""

GROUP_SERVING = "group.serving"
GROUP_EPOCH_ENDED = "group.epoch_ended"
GROUP_FEWER_CHIPS = "group.fewer_chips"
GROUP_ROWS_CLAMPED = "group.rows_clamped"
WORKER_REFUSED = {
    WorkerState.CORDONED: "worker.cordoned",
    WorkerState.MISMATCHED: "worker.mismatched",
}


class GroupListener(Protocol):
    """Who is told of groups that come and go."""

    def group_serves(self, group: ChipGroup, ranks: list[Worker], now: float) -> None:
        """Every rank is ready; each has its `ready` record."""

    def group_ended(self, group: ChipGroup, now: float) -> None:
        """A serving group's epoch is over."""


class GroupEpochs:
    """Begins and ends them.

    Sets a group's state, epoch and ranks, and which of its workers are idle, cordoned, mismatched,
    forming or serving; the other states of workers `ChipGroups` sets.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        workers: WorkerTable,
        watch: HeartbeatWatch,
        timers: Timers,
        emit: Callable[[Effect], None],
        listener: GroupListener,
    ) -> None:
        self._watch = watch
        self._workers = workers
        self._config = config
        self._timers = timers
        self._emit = emit
        self._listener = listener
        self._epoch_highest = 0

    def ranks(self, group: ChipGroup) -> list[Worker]:
        """The attached workers of a group's present epoch, in the order of ranks."""
        workers = [self._workers.get(worker_id) for worker_id in group.ranks]
        return [worker for worker in workers if worker and worker.is_attached]

    def try_form(self, group: ChipGroup, now: float) -> None:
        """Starts an epoch if every member is idle and may be used, or the rest is given up."""
        if group.state is not GroupState.WAITING:
            return
        self._review(group, now)
        found = muster(group, self._workers)
        if not found.members:
            return
        if found.awaited or (found.missing and not self._config.fewer_chips):
            self._wait_for_rest(group, found, now)
            return
        if now < group.retry_at:
            self._timers.set(("retry", group.group_id), group.retry_at)
            return
        self._timers.clear(("start", group.group_id))
        self._begin_epoch(group, found, now)

    def rank_ready(self, group: ChipGroup, now: float) -> None:
        """A rank can take steps; with the last one the group serves."""
        ranks = self.ranks(group)
        if group.out or any(rank.state is not WorkerState.READY for rank in ranks):
            return
        group.state = GroupState.SERVING
        self._timers.clear(("form", group.group_id))
        for rank in ranks:
            rank.state = WorkerState.SERVING
            rank.has_served = True
            rank.heartbeat_at = now  # The shorter allowance begins only now.
            self._watch.arm(rank, now)
        self._emit(Log(GROUP_SERVING, {"group": group.group_id, "epoch": group.epoch}))
        self._listener.group_serves(group, ranks, now)

    def rank_failed(
        self, group: ChipGroup, worker_id: str, reason: str, now: float, level: LogLevel
    ) -> None:
        """A rank cannot go on: the epoch ends, at once unless it forms. level: of the record."""
        group.out.add(worker_id)
        ranks = self.ranks(group)
        if group.state is not GroupState.FORMING or all(r.worker_id in group.out for r in ranks):
            self.end(group, reason, now, level)
        elif not self._timers.has(("gather", group.group_id)):
            group.ended_by = reason
            self._timers.set(("gather", group.group_id), now + GATHER_S)

    def end(
        self, group: ChipGroup, reason: str, now: float, level: LogLevel = LogLevel.WARNING
    ) -> None:
        """Ends a group's epoch, tells the workers still attached, and forms it again if it can."""
        was_serving = group.state is GroupState.SERVING
        if group.state is GroupState.WAITING:
            return
        group.state = GroupState.WAITING
        self._timers.clear(("form", group.group_id))
        self._timers.clear(("gather", group.group_id))
        fields = {"group": group.group_id, "epoch": group.epoch, "reason": reason}
        self._emit(Log(GROUP_EPOCH_ENDED, fields, level))
        for rank in self.ranks(group):
            if rank.is_forming or rank.is_serving:
                if rank.is_forming:
                    rank.heartbeat_at = now  # Loading may have kept it from a sign of life.
                rank.state = WorkerState.IDLE
                rank.ready = None
                self._watch.arm(rank, now)
                info = rank.info
                self._emit(ResetWorker(info.worker_id, info.incarnation, group.epoch, reason))
        if group.failures:
            pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(group.failures - 1, 10))
            group.retry_at = now + pause_s
        group.failures += 1
        group.ranks = ()
        group.out.clear()
        if was_serving:
            self._listener.group_ended(group, now)
        self.try_form(group, now)

    def start_overdue(self, group: ChipGroup, now: float) -> None:
        """A group waited long enough for those that have not come: it goes on without them."""
        found = muster(group, self._workers)
        if group.state is not GroupState.WAITING or not found.members:
            return
        for worker_id in self._absent(found):
            group.given_up[worker_id] = (
                f"it did not come within {self._config.start_deadline_s:g} s"
            )
        self.try_form(group, now)

    def _begin_epoch(self, group: ChipGroup, found: Muster, now: float) -> None:
        ranks = found.members
        self._epoch_highest += 1
        group.epoch = self._epoch_highest
        group.state = GroupState.FORMING
        group.ranks = tuple(rank.worker_id for rank in ranks)
        group.rendezvous_opened = False
        multiples = [rank.info.block_tokens_multiple for rank in ranks]
        group.block_tokens = math.lcm(self._config.block_tokens, *multiples)
        group.slots_count = self._allowed_rows(group, ranks)
        if found.missing:
            fields: dict[str, object] = {"group": group.group_id, "epoch": group.epoch}
            fields |= {"chips": len(ranks), "missing": found.missing}
            self._emit(Log(GROUP_FEWER_CHIPS, fields, LogLevel.WARNING))
        deadline_s = self._config.formation_deadline_s
        self._timers.set(("form", group.group_id), now + deadline_s)
        for i, rank in enumerate(ranks):
            rank.state = WorkerState.FORMING
            self._watch.arm(rank, now)
            self._emit(
                FormGroup(
                    worker_id=rank.worker_id,
                    incarnation=rank.info.incarnation,
                    group_id=group.group_id,
                    epoch=group.epoch,
                    rank=i,
                    world_size=len(ranks),
                    deadline_s=deadline_s,
                    block_tokens=group.block_tokens,
                    slots=group.slots_count,
                )
            )

    def _allowed_rows(self, group: ChipGroup, ranks: Sequence[Worker]) -> int:
        """Requests a group may compute at once: what is configured, or what its chips accept."""
        asked = self._config.running_max
        limited = [rank for rank in ranks if 0 < rank.info.rows_max < asked]
        if not limited:
            return asked
        smallest = min(limited, key=lambda rank: rank.info.rows_max)
        fields: dict[str, object] = {
            "group": group.group_id,
            "worker": smallest.worker_id,
            "device": smallest.info.device,
            "rows_max": smallest.info.rows_max,
            "setting": "--max-running",
            "asked": asked,
        }
        self._emit(Log(GROUP_ROWS_CLAMPED, fields, LogLevel.WARNING))
        return smallest.info.rows_max

    def _review(self, group: ChipGroup, now: float) -> None:
        """Brings the states of unused workers up to date: cordoned, of another model, or idle.

        Their model is the one most of them have; between two as many, that of the first worker.
        """
        unused = (WorkerState.IDLE, WorkerState.MISMATCHED, WorkerState.CORDONED)
        known = [self._workers.get(worker_id) for worker_id in group.worker_ids]
        attached = [worker for worker in known if worker and worker.state in unused]
        models = Counter(
            _model_of(worker)
            for worker in attached
            if not self._workers.is_cordoned(worker.worker_id, now)
        )
        model = max(models, key=models.__getitem__, default=None)
        for worker in attached:
            state = WorkerState.IDLE
            if self._workers.is_cordoned(worker.worker_id, now):
                state = WorkerState.CORDONED
                until = self._workers.cordoned_until(worker.worker_id)
                self._timers.set(("retry", group.group_id), until)
            elif _model_of(worker) != model:
                state = WorkerState.MISMATCHED
            if state is not worker.state and state is not WorkerState.IDLE:
                event = WORKER_REFUSED[state]
                digest, windows = _model_of(worker)
                told = {"model": digest, "kv_windows": windows}
                self._emit(worker_log(event, worker, LogLevel.WARNING, **told))
            worker.state = state

    def _wait_for_rest(self, group: ChipGroup, found: Muster, now: float) -> None:
        """Who is not there has a limited time from when the first one waits for it."""
        key = ("start", group.group_id)
        if self._config.fewer_chips and self._absent(found) and not self._timers.has(key):
            self._timers.set(key, now + self._config.start_deadline_s)

    def _absent(self, found: Muster) -> list[str]:
        """Who is waited for and has no process here."""
        return [name for name in found.awaited if not self._workers.is_attached(name)]


def _model_of(worker: Worker) -> tuple[str, tuple[int, ...]]:
    """What all workers of a group must agree on."""
    return worker.info.model_digest, worker.info.kv_windows
