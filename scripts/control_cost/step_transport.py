"""What it takes to send a step to a worker and to receive its result, over loopback gRPC.

CoreLoop --SendStep--> Dispatcher --> StepStream --> (another process) --> StepStream --> CoreLoop

Everything around the scheduling core runs as in the service; in place of the core stands one that
sends the next step when the result of the last one is back.
"""

import time
from collections.abc import Callable
from statistics import median

import anyio

from control_plane.config import SchedulingConfig
from control_plane.core_loop import CoreLoop
from control_plane.dispatch import wire
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.wire import GroupSettings
from control_plane.dispatch.worker_server import WorkerServer
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    Effect,
    Event,
    FormGroup,
    SendStep,
    Snapshot,
    StepDone,
    StepPlan,
    StepRow,
    Tick,
    WorkerAttached,
)
from scripts.control_cost.peer import peer

TERM = 1
MESSAGE_BYTES_MAX = 64 << 20
QUIET_S = 3600.0
"""Between heartbeats: none comes while it is measured."""
ATTACH_DEADLINE_S = 60.0
STEP_DEADLINE_S = 10.0
WARM_UP_STEPS = 20


class PeerFailed(Exception):
    """The process at the other end did not do its part."""


class _SendingCore:
    """Takes the place of the scheduling core; steps go to the groups in turn."""

    def __init__(self, groups_count: int, rows_count: int) -> None:
        self.attached = anyio.Event()
        self.finished = anyio.Event()
        self.times_s: list[float] = []
        self._groups_count = groups_count
        self._rows_count = rows_count
        self._plans: list[StepPlan] = []
        self._worker_ids: list[str] = []
        self._left = 0

    def begin(self, steps_count: int) -> None:
        """The next tick sends the first of so many steps."""
        self._left = steps_count + 1
        self._started_s = time.process_time()

    def handle(self, event: Event, _now: float) -> list[Effect]:
        match event:
            case WorkerAttached(worker=worker):
                group_id, epoch = f"g{len(self._plans)}", len(self._plans) + 1
                self._plans.append(self._plan(group_id, epoch))
                self._worker_ids.append(worker.worker_id)
                if len(self._plans) == self._groups_count:
                    self.attached.set()
                form = FormGroup(
                    *(worker.worker_id, worker.incarnation, group_id, epoch, 0, 1), deadline_s=60.0
                )
                return [form]
            case StepDone():
                now_s = time.process_time()
                self.times_s.append(now_s - self._started_s)
                self._started_s = now_s
                return self._next()
            case Tick():
                return self._next()
        return []

    def snapshot(self, _now: float) -> Snapshot:
        raise AssertionError("nobody asks")

    def _next(self) -> list[Effect]:
        self._left -= 1
        if not self._left:
            self.finished.set()
            return []
        index = self._left % self._groups_count
        return [SendStep((self._worker_ids[index],), self._plans[index])]

    def _plan(self, group_id: str, epoch: int) -> StepPlan:
        """Every row decodes, one in sixteen gets a block."""
        slots = range(self._rows_count)
        return StepPlan(
            group_id=group_id,
            epoch=epoch,
            step_id=1,
            new_blocks=tuple((slot, 0, 1000 + slot) for slot in slots[::16]),
            rows=tuple(StepRow(slot, 1, True) for slot in slots),
        )
