"""The chip groups: which workers make up which group, in which epoch, and when an epoch ends.

    waiting --members idle--> forming --all ready--> serving
       ^                         |                     |
       '------ a rank lost, faulted, silent or late ---'

The members are all workers of the group, or those that can while the others cannot (`muster`).

Decides about workers only; what becomes of the requests, its listener decides.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from control_plane.config import SchedulingConfig
from control_plane.scheduling.group_members import ChipGroup, GroupState, Muster, muster
from control_plane.scheduling.heartbeat_watch import HeartbeatWatch
from control_plane.scheduling.messages import (
    Condemn,
    DropWorker,
    Effect,
    FormGroup,
    Log,
    LogLevel,
    LossKind,
    RendezvousOpened,
    ResetWorker,
    SendRendezvous,
    WorkerFaulted,
    WorkerInfo,
    WorkerLost,
    WorkerReady,
)
from control_plane.scheduling.timers import Timers
from control_plane.scheduling.worker_table import (
    OWN_FAULT_KINDS,
    Worker,
    WorkerState,
    WorkerTable,
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
WORKER_LOST = "worker.lost"
WORKER_FAULTED = "worker.faulted"
WORKER_UNAVAILABLE = "worker.unavailable"
WORKER_UNUSED = "worker.unused"
WORKER_REFUSED = {
    WorkerState.CORDONED: "worker.cordoned",
    WorkerState.MISMATCHED: "worker.mismatched",
}
EVENT_STALE = "worker.event_stale"


class GroupListener(Protocol):
    """Who is told of groups that come and go."""

    def group_serves(self, group: ChipGroup, ranks: list[Worker], now: float) -> None:
        """Every rank is ready; each has its `ready` record."""

    def group_ended(self, group: ChipGroup, now: float) -> None:
        """A serving group's epoch is over."""


class ChipGroups:
    """The table of groups and workers."""

    def __init__(
        self,
        config: SchedulingConfig,
        timers: Timers,
        emit: Callable[[Effect], None],
        listener: GroupListener,
    ) -> None:
        self.workers = WorkerTable(config.own_faults_max, config.own_faults_window_s)
        self.groups: dict[str, ChipGroup] = {}
        self._watch = HeartbeatWatch(config, timers)
        self._config = config
        self._timers = timers
        self._emit = emit
        self._listener = listener
        self._group_of: dict[str, ChipGroup] = {}
        self._epoch_highest = 0
        first = 0
        for i, size in enumerate(config.group_sizes):
            worker_ids = tuple(f"chip{k}" for k in range(first, first + size))
            group = ChipGroup(f"g{i}", worker_ids)
            self.groups[group.group_id] = group
            self._group_of.update(dict.fromkeys(worker_ids, group))
            first += size

    # ------------------------------------------------------------ events

    def attach(self, info: WorkerInfo, now: float) -> None:
        """A process introduced itself; it takes its name over from an older one."""
        group = self._group_of.get(info.worker_id)
        older = self.workers.get(info.worker_id)
        if older and older.is_attached:
            older.state = WorkerState.LOST
            if older.info.incarnation != info.incarnation:
                self._drop(older, "superseded by a newer process of the same name")
            if group and info.worker_id in group.ranks:
                self.end_epoch(group, f"worker {info.worker_id} registered again", now)
        worker = Worker(info, group.group_id if group else "", now)
        if older and older.info.incarnation == info.incarnation:
            worker.has_served = older.has_served
        self.workers.put(worker)
        self._watch.arm(worker, now)
        if group is None:
            worker.state = WorkerState.UNUSED
            why = "no group has a worker of this name"
            self._log(WORKER_UNUSED, worker, LogLevel.WARNING, reason=why)
            return
        group.given_up.pop(info.worker_id, None)
        if info.unavailable_reason is not None:
            self.workers.count_fault(info.worker_id, now)
            self._set_unavailable(worker, info.unavailable_reason)
        self._try_form(group, now)

    def lost(self, event: WorkerLost, now: float) -> None:
        """A worker's stream ended."""
        worker = self._known(event.worker_id, event.incarnation)
        if worker is None:
            return
        if event.kind in OWN_FAULT_KINDS:
            self.workers.count_fault(worker.worker_id, now)
        level = LogLevel.INFO if event.kind is LossKind.GOODBYE else LogLevel.WARNING
        self._log(WORKER_LOST, worker, level, kind=event.kind.value, reason=event.message)
        self._set_gone(worker, f"its process ended while its group formed: {event.message}")
        self._rank_failed(worker, f"worker {worker.worker_id} was lost: {event.message}", now)
        self._forget_unused(worker)

    def faulted(self, event: WorkerFaulted, now: float) -> None:
        """A worker cannot go on in its epoch, or, if its process exits, at all."""
        if event.exiting:
            worker = self._known(event.worker_id, event.incarnation)
        else:
            worker = self._in_epoch(event.worker_id, event.incarnation, event.epoch)
        if worker is None:
            return
        is_own = event.kind in OWN_FAULT_KINDS
        if is_own:
            self.workers.count_fault(worker.worker_id, now)
        kind = event.kind.value
        self._log(WORKER_FAULTED, worker, LogLevel.WARNING, kind=kind, reason=event.message)
        if is_own and not worker.has_served and (worker.is_forming or event.exiting):
            self._set_unavailable(worker, event.message)
            if not event.exiting:
                # A fresh process is the next thing to try, and this one cannot know it.
                self._drop(worker, f"its chip failed while its group formed: {event.message}")
        elif event.exiting:
            # Its stream ends in a moment: no epoch can be formed with it.
            worker.state = WorkerState.LOST
        self._rank_failed(worker, f"worker {worker.worker_id} faulted: {event.message}", now)
        if event.exiting:
            self._forget_unused(worker)

    def rendezvous(self, event: RendezvousOpened) -> None:
        """Rank 0 opened the meeting point: the other ranks are told."""
        worker = self._in_epoch(event.worker_id, event.incarnation, event.epoch)
        if worker is None:
            return
        group = self._group_of[worker.worker_id]
        group.rendezvous_opened = True
        for rank in self._ranks(group):
            info = rank.info
            if info.worker_id == worker.worker_id:
                continue
            self._emit(SendRendezvous(info.worker_id, info.incarnation, event.epoch, event.address))

    def ready(self, event: WorkerReady, now: float) -> None:
        """A worker can take steps; with the last rank the group serves."""
        worker = self._in_epoch(event.worker_id, event.incarnation, event.epoch)
        if worker is None or worker.state is not WorkerState.FORMING:
            return
        worker.state = WorkerState.READY
        worker.ready = event
        worker.heartbeat_at = now
        group = self._group_of[worker.worker_id]
        ranks = self._ranks(group)
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

    def heartbeat(self, worker_id: str, incarnation: int, now: float) -> None:
        """A sign of life."""
        worker = self._known(worker_id, incarnation)
        if worker:
            worker.heartbeat_at = now

    def serving_rank(
        self, worker_id: str, incarnation: int, group_id: str, epoch: int
    ) -> ChipGroup | None:
        """The group a step's result comes from, if it is rank 0 of its present epoch."""
        worker = self._in_epoch(worker_id, incarnation, epoch)
        if worker is None:
            return None
        group = self._group_of[worker_id]
        if group.group_id != group_id or group.ranks[0] != worker_id:
            why = "not a result of its group's rank 0"
            self._log(EVENT_STALE, worker, LogLevel.DEBUG, reason=why)
            return None
        return group if group.state is GroupState.SERVING else None

    # ------------------------------------------------------------ deadlines

    def heartbeat_due(self, worker_id: str, now: float) -> None:
        """The heartbeat timer fired: the worker is silent, or the timer is set again."""
        worker = self.workers.get(worker_id)
        if worker is None or not worker.is_attached:
            return
        if not self._watch.is_silent(worker, now):
            return
        silent_s = now - worker.heartbeat_at
        self._condemn(worker, f"no heartbeat for {silent_s:.1f} s")
        self._rank_failed(worker, f"worker {worker_id} is silent", now)

    def formation_due(self, group_id: str, now: float) -> None:
        """A group was not ready in time. Blamed are those who kept the others waiting."""
        group = self.groups[group_id]
        if group.state is not GroupState.FORMING:
            return
        ranks = [rank for rank in self._ranks(group) if rank.worker_id not in group.out]
        late = [rank for rank in ranks if rank.state is WorkerState.FORMING]
        if len(group.ranks) > 1 and not group.rendezvous_opened:
            late = [rank for rank in ranks if rank.worker_id == group.ranks[0]]
        elif group.out or len(late) == len(ranks) > 1:
            late = []
        for worker in late:
            self.workers.count_fault(worker.worker_id, now)
            self._condemn(worker, f"not ready {self._config.formation_deadline_s:g} s after start")
        self.end_epoch(group, "not formed in time", now)

    def step_overdue(self, group_id: str, now: float) -> None:
        """A step's result did not come. Blamed are the silent ranks, or the only one."""
        group = self.groups[group_id]
        ranks = self._ranks(group)
        silent = [rank for rank in ranks if now - rank.heartbeat_at > self._config.lease_s]
        for worker in ranks if len(ranks) == 1 else silent:
            self.workers.count_fault(worker.worker_id, now)
            self._condemn(worker, f"a step took over {self._config.step_deadline_s:g} s")
        self.end_epoch(group, "a step's result is overdue", now)

    def gathered(self, group_id: str, now: float) -> None:
        """The moment after the first failure in a forming group is over."""
        group = self.groups[group_id]
        self.end_epoch(group, group.ended_by, now)

    def start_overdue(self, group_id: str, now: float) -> None:
        """A group waited long enough for those that have not come: it goes on without them."""
        group = self.groups[group_id]
        found = muster(group, self.workers)
        if group.state is not GroupState.WAITING or not found.members:
            return
        for worker_id in self._absent(found):
            group.given_up[worker_id] = (
                f"it did not come within {self._config.start_deadline_s:g} s"
            )
        self._try_form(group, now)

    def retry_due(self, group_id: str, now: float) -> None:
        """The pause before forming a group again is over."""
        self._try_form(self.groups[group_id], now)

    def step_finished(self, group: ChipGroup) -> None:
        """A step came back: the group works."""
        group.failures = 0

    def forgive(self, stall_s: float, now: float) -> None:
        """The control plane itself stood still so long: nobody was silent or late meanwhile."""
        for worker in self.workers.attached():
            worker.heartbeat_at = now
        for kind in ("form", "gather", "start"):
            self._timers.postpone(kind, stall_s)

    # ------------------------------------------------------------ epochs

    def end_epoch(self, group: ChipGroup, reason: str, now: float) -> None:
        """Ends a group's epoch, tells the workers still attached, and forms it again if it can."""
        was_serving = group.state is GroupState.SERVING
        if group.state is GroupState.WAITING:
            return
        group.state = GroupState.WAITING
        self._timers.clear(("form", group.group_id))
        self._timers.clear(("gather", group.group_id))
        fields = {"group": group.group_id, "epoch": group.epoch, "reason": reason}
        self._emit(Log(GROUP_EPOCH_ENDED, fields, LogLevel.WARNING))
        for rank in self._ranks(group):
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
        self._try_form(group, now)

    def _rank_failed(self, worker: Worker, reason: str, now: float) -> None:
        """A worker cannot go on; if it is a rank, its epoch ends, at once unless it forms."""
        group = self._group_of.get(worker.worker_id)
        if group is None or worker.worker_id not in group.ranks:
            return
        group.out.add(worker.worker_id)
        ranks = self._ranks(group)
        if group.state is not GroupState.FORMING or all(r.worker_id in group.out for r in ranks):
            self.end_epoch(group, reason, now)
        elif not self._timers.has(("gather", group.group_id)):
            group.ended_by = reason
            self._timers.set(("gather", group.group_id), now + GATHER_S)

    def _try_form(self, group: ChipGroup, now: float) -> None:
        """Starts an epoch if every member is idle and may be used, or the rest is given up."""
        if group.state is not GroupState.WAITING:
            return
        self._review(group, now)
        found = muster(group, self.workers)
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
        known = [self.workers.get(worker_id) for worker_id in group.worker_ids]
        attached = [worker for worker in known if worker and worker.state in unused]
        digests = Counter(
            worker.info.model_digest
            for worker in attached
            if not self.workers.is_cordoned(worker.worker_id, now)
        )
        digest = max(digests, key=digests.__getitem__, default="")
        for worker in attached:
            state = WorkerState.IDLE
            if self.workers.is_cordoned(worker.worker_id, now):
                state = WorkerState.CORDONED
                until = self.workers.cordoned_until(worker.worker_id)
                self._timers.set(("retry", group.group_id), until)
            elif worker.info.model_digest != digest:
                state = WorkerState.MISMATCHED
            if state is not worker.state and state is not WorkerState.IDLE:
                event = WORKER_REFUSED[state]
                self._log(event, worker, LogLevel.WARNING, model=worker.info.model_digest)
            worker.state = state

    def _wait_for_rest(self, group: ChipGroup, found: Muster, now: float) -> None:
        """Who is not there has a limited time from when the first one waits for it."""
        key = ("start", group.group_id)
        if self._config.fewer_chips and self._absent(found) and not self._timers.has(key):
            self._timers.set(key, now + self._config.start_deadline_s)

    def _absent(self, found: Muster) -> list[str]:
        """Who is waited for and has no process here."""
        return [name for name in found.awaited if not self.workers.is_attached(name)]

    def _ranks(self, group: ChipGroup) -> list[Worker]:
        """The attached workers of a group's present epoch, in the order of ranks."""
        workers = [self.workers.get(worker_id) for worker_id in group.ranks]
        return [worker for worker in workers if worker and worker.is_attached]

    # ------------------------------------------------------------ who is meant

    def _known(self, worker_id: str, incarnation: int) -> Worker | None:
        worker = self.workers.find(worker_id, incarnation)
        if worker is None:
            fields: dict[str, object] = {"worker": worker_id, "incarnation": incarnation}
            self._emit(Log(EVENT_STALE, fields, LogLevel.DEBUG))
        return worker

    def _in_epoch(self, worker_id: str, incarnation: int, epoch: int) -> Worker | None:
        """The worker, if the event is of the epoch it is in."""
        worker = self._known(worker_id, incarnation)
        if worker is None:
            return None
        group = self._group_of.get(worker_id)
        if group is None or group.epoch != epoch or worker_id not in group.ranks:
            self._log(EVENT_STALE, worker, LogLevel.DEBUG, epoch=epoch)
            return None
        return worker

    def _condemn(self, worker: Worker, reason: str) -> None:
        info = worker.info
        self._set_gone(worker, reason)
        self._emit(Condemn(info.worker_id, info.incarnation, info.pid, reason))
        self._drop(worker, reason)
        self._forget_unused(worker)

    def _set_gone(self, worker: Worker, reason: str) -> None:
        """Its process is over: lost, or unavailable if it never got as far as serving."""
        if worker.is_forming and not worker.has_served:
            self._set_unavailable(worker, reason)
        else:
            worker.state = WorkerState.LOST

    def _set_unavailable(self, worker: Worker, reason: str) -> None:
        worker.state = WorkerState.UNAVAILABLE
        worker.reason = reason
        self._log(WORKER_UNAVAILABLE, worker, LogLevel.WARNING, reason=reason)

    def _forget_unused(self, worker: Worker) -> None:
        """A name of no group need not be remembered once its process is gone."""
        if worker.worker_id not in self._group_of:
            self.workers.forget(worker.worker_id)

    def _drop(self, worker: Worker, reason: str) -> None:
        self._emit(DropWorker(worker.worker_id, worker.info.incarnation, reason))

    def _log(self, event: str, worker: Worker, level: LogLevel, **fields: object) -> None:
        names: dict[str, object] = {
            "worker": worker.worker_id,
            "incarnation": worker.info.incarnation,
        }
        self._emit(Log(event, names | fields, level))
