"""The table of chip groups and workers: what each event of a worker means for its group's epoch.

events of workers, timers --> ChipGroups --> states of workers, blame --> GroupEpochs

Decides about workers only; what becomes of the requests, its listener decides.
"""

from collections.abc import Callable

from control_plane.config import SchedulingConfig
from control_plane.scheduling.group_epochs import GroupEpochs, GroupListener
from control_plane.scheduling.group_members import ChipGroup, GroupState
from control_plane.scheduling.heartbeat_watch import HeartbeatWatch
from control_plane.scheduling.messages import (
    Condemn,
    DropWorker,
    Effect,
    Log,
    LogLevel,
    LossKind,
    RendezvousOpened,
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
    worker_log,
)

WORKER_LOST = "worker.lost"
WORKER_FAULTED = "worker.faulted"
WORKER_UNAVAILABLE = "worker.unavailable"
WORKER_UNUSED = "worker.unused"
EVENT_STALE = "worker.event_stale"


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
        self._epochs = GroupEpochs(config, self.workers, self._watch, timers, emit, listener)
        self._config = config
        self._timers = timers
        self._emit = emit
        self._group_of: dict[str, ChipGroup] = {}
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
                self._epochs.end(group, f"worker {info.worker_id} registered again", now)
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
        self._epochs.try_form(group, now)

    def lost(self, event: WorkerLost, now: float) -> None:
        """A worker's stream ended."""
        worker = self._known(event.worker_id, event.incarnation)
        if worker is None:
            return
        if event.kind in OWN_FAULT_KINDS:
            self.workers.count_fault(worker.worker_id, now)
        # Who says goodbye was told to leave, as all are when the service stops.
        level = LogLevel.INFO if event.kind is LossKind.GOODBYE else LogLevel.WARNING
        self._log(WORKER_LOST, worker, level, kind=event.kind.value, reason=event.message)
        reason = f"its process ended while its group formed: {event.message}"
        self._set_gone(worker, reason, level)
        reason = f"worker {worker.worker_id} was lost: {event.message}"
        self._rank_failed(worker, reason, now, level)
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
        for rank in self._epochs.ranks(group):
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
        self._epochs.rank_ready(self._group_of[worker.worker_id], now)

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
        ranks = [rank for rank in self._epochs.ranks(group) if rank.worker_id not in group.out]
        late = [rank for rank in ranks if rank.state is WorkerState.FORMING]
        if len(group.ranks) > 1 and not group.rendezvous_opened:
            late = [rank for rank in ranks if rank.worker_id == group.ranks[0]]
        elif group.out or len(late) == len(ranks) > 1:
            late = []
        for worker in late:
            self.workers.count_fault(worker.worker_id, now)
            self._condemn(worker, f"not ready {self._config.formation_deadline_s:g} s after start")
        self._epochs.end(group, "not formed in time", now)

    def step_overdue(self, group_id: str, now: float) -> None:
        """A step's result did not come. Blamed are the silent ranks, or the only one."""
        group = self.groups[group_id]
        ranks = self._epochs.ranks(group)
        silent = [rank for rank in ranks if now - rank.heartbeat_at > self._config.lease_s]
        for worker in ranks if len(ranks) == 1 else silent:
            self.workers.count_fault(worker.worker_id, now)
            self._condemn(worker, f"a step took over {self._config.step_deadline_s:g} s")
        self._epochs.end(group, "a step's result is overdue", now)

    def gathered(self, group_id: str, now: float) -> None:
        """The moment after the first failure in a forming group is over."""
        group = self.groups[group_id]
        self._epochs.end(group, group.ended_by, now)

    def start_overdue(self, group_id: str, now: float) -> None:
        """A group waited long enough for those that have not come."""
        self._epochs.start_overdue(self.groups[group_id], now)

    def retry_due(self, group_id: str, now: float) -> None:
        """The pause before forming a group again is over."""
        self._epochs.try_form(self.groups[group_id], now)

    def end_epoch(self, group: ChipGroup, reason: str, now: float) -> None:
        """Ends a group's epoch; it is formed again if it can."""
        self._epochs.end(group, reason, now)

    def step_finished(self, group: ChipGroup) -> None:
        """A step came back: the group works."""
        group.failures = 0

    def forgive(self, stall_s: float, now: float) -> None:
        """The control plane itself stood still so long: nobody was silent or late meanwhile."""
        for worker in self.workers.attached():
            worker.heartbeat_at = now
        for kind in ("form", "gather", "start"):
            self._timers.postpone(kind, stall_s)

    # ------------------------------------------------------------ who is meant

    def _rank_failed(
        self, worker: Worker, reason: str, now: float, level: LogLevel = LogLevel.WARNING
    ) -> None:
        """A worker cannot go on, which matters if it is a rank."""
        group = self._group_of.get(worker.worker_id)
        if group is not None and worker.worker_id in group.ranks:
            self._epochs.rank_failed(group, worker.worker_id, reason, now, level)

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

    def _set_gone(self, worker: Worker, reason: str, level: LogLevel = LogLevel.WARNING) -> None:
        """Its process is over: lost, or unavailable if it never got as far as serving."""
        if worker.is_forming and not worker.has_served:
            self._set_unavailable(worker, reason, level)
        else:
            worker.state = WorkerState.LOST

    def _set_unavailable(
        self, worker: Worker, reason: str, level: LogLevel = LogLevel.WARNING
    ) -> None:
        worker.state = WorkerState.UNAVAILABLE
        worker.reason = reason
        self._log(WORKER_UNAVAILABLE, worker, level, reason=reason)

    def _forget_unused(self, worker: Worker) -> None:
        """A name of no group need not be remembered once its process is gone."""
        if worker.worker_id not in self._group_of:
            self.workers.forget(worker.worker_id)

    def _drop(self, worker: Worker, reason: str) -> None:
        self._emit(DropWorker(worker.worker_id, worker.info.incarnation, reason))

    def _log(self, event: str, worker: Worker, level: LogLevel, **fields: object) -> None:
        self._emit(worker_log(event, worker, level, **fields))
