"""The worker processes as the control plane knows them: who is here, alive, and to blame."""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from control_plane.scheduling.messages import (
    Log,
    LogLevel,
    LossKind,
    WorkerInfo,
    WorkerReady,
    WorkerSnapshot,
)
from control_plane.scheduling.name_order import name_order

OWN_FAULT_KINDS = (LossKind.DEVICE, LossKind.MODEL, LossKind.INTERNAL)
"""Losses a chip is to blame for; a stream that broke or a late peer is none of its doing."""

SAME_FAULT_S = 1.0


class WorkerState(Enum):
    """What a worker process is doing."""

    IDLE = "idle"  # attached, in no epoch
    FORMING = "forming"  # loading, joining, warming up
    READY = "ready"  # waits for the other ranks
    SERVING = "serving"
    CORDONED = "cordoned"  # attached, but not used: too many faults of its own
    MISMATCHED = "mismatched"  # attached, but not used: it serves another model than its group
    UNUSED = "unused"  # attached, but of no group
    UNAVAILABLE = (
        "unavailable"  # its chip failed before it ever served; a new process may do better
    )
    LOST = "lost"  # its stream is gone


@dataclass(slots=True)
class Worker:
    """One worker name and the process that has it now.

    reason: why its chip is unavailable. has_served: this process was a rank of a group that served.
    """

    info: WorkerInfo
    group_id: str
    heartbeat_at: float
    state: WorkerState = WorkerState.IDLE
    ready: WorkerReady | None = None
    reason: str = ""
    has_served: bool = False

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.info.worker_id

    @property
    def is_serving(self) -> bool:
        """Whether it takes steps."""
        return self.state is WorkerState.SERVING

    @property
    def is_attached(self) -> bool:
        """Whether its process is there, as far as it can be of use."""
        return self.state not in (WorkerState.LOST, WorkerState.UNAVAILABLE)

    @property
    def is_forming(self) -> bool:
        """Whether it gets ready to take steps, or waits for the other ranks."""
        return self.state in (WorkerState.FORMING, WorkerState.READY)


class WorkerTable:
    """Workers by name, and the faults of each name within the window that cordons it."""

    def __init__(self, faults_max: int, window_s: float) -> None:
        self._faults_max = faults_max
        self._window_s = window_s
        self._workers: dict[str, Worker] = {}
        self._faults: dict[str, deque[float]] = {}

    def put(self, worker: Worker) -> None:
        """A process takes a name."""
        self._workers[worker.worker_id] = worker

    def get(self, worker_id: str) -> Worker | None:
        """The process that last had a name."""
        return self._workers.get(worker_id)

    def find(self, worker_id: str, incarnation: int) -> Worker | None:
        """The attached process of this name and incarnation; None for one that is unavailable."""
        worker = self._workers.get(worker_id)
        if worker and worker.is_attached and worker.info.incarnation == incarnation:
            return worker
        return None

    def is_attached(self, worker_id: str) -> bool:
        """Whether the name has a process that is there and not unavailable."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.is_attached

    def attached(self) -> list[Worker]:
        """Every process that is there and not unavailable."""
        return [worker for worker in self._workers.values() if worker.is_attached]

    def forget(self, worker_id: str) -> None:
        """A name that means nothing any more."""
        self._workers.pop(worker_id, None)
        self._faults.pop(worker_id, None)

    def count_fault(self, worker_id: str, now: float) -> None:
        """A fault of its own; what a dying process reports within a second is one fault."""
        faults = self._faults.setdefault(worker_id, deque(maxlen=self._faults_max))
        if not faults or now - faults[-1] > SAME_FAULT_S:
            faults.append(now)

    def is_cordoned(self, worker_id: str, now: float) -> bool:
        """Whether it had too many faults of its own lately."""
        faults = self._faults.get(worker_id, deque())
        while faults and faults[0] <= now - self._window_s:
            faults.popleft()
        return len(faults) >= self._faults_max

    def cordoned_until(self, worker_id: str) -> float:
        """When enough of its faults are forgotten."""
        return self._faults[worker_id][-self._faults_max] + self._window_s

    def snapshots(self, now: float) -> tuple[WorkerSnapshot, ...]:
        """Every name of a group ever seen, and unused ones that are attached, for `status`."""
        return tuple(
            WorkerSnapshot(
                worker_id=worker.worker_id,
                pid=worker.info.pid,
                incarnation=worker.info.incarnation,
                state=worker.state.value,
                device=worker.info.device,
                backend=worker.info.backend,
                group_id=worker.group_id,
                heartbeat_age_s=now - worker.heartbeat_at,
                blocks=worker.ready.blocks if worker.ready and worker.is_serving else 0,
                reason=worker.reason,
                device_id=worker.info.device_id,
                chip_index=worker.info.chip_index,
            )
            for _, worker in sorted(self._workers.items(), key=lambda item: name_order(item[0]))
        )


def worker_log(event: str, worker: Worker, level: LogLevel, **fields: object) -> Log:
    """A record about a worker's process."""
    names: dict[str, object] = {"worker": worker.worker_id, "incarnation": worker.info.incarnation}
    return Log(event, names | fields, level)
