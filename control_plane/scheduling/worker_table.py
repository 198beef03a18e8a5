"""The worker processes as the control plane knows them: who is here, alive, and to blame."""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from control_plane.scheduling.messages import LossKind, WorkerInfo, WorkerReady, WorkerSnapshot

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
    LOST = "lost"  # its stream is gone


@dataclass(slots=True)
class Worker:
    """One worker name and the process that has it now."""

    info: WorkerInfo
    group_id: str
    heartbeat_at: float
    state: WorkerState = WorkerState.IDLE
    ready: WorkerReady | None = None

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
        """Whether its stream is open."""
        return self.state is not WorkerState.LOST


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
        """The attached process of this name and incarnation."""
        worker = self._workers.get(worker_id)
        if worker and worker.is_attached and worker.info.incarnation == incarnation:
            return worker
        return None

    def attached(self) -> list[Worker]:
        """Every process whose stream is open."""
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
            )
            for _, worker in sorted(self._workers.items())
        )
