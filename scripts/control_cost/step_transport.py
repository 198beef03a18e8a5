"""What it takes to send a step to a worker and to receive its result, over loopback gRPC.

CoreLoop --SendStep--> Dispatcher --> StepStream --> (another process) --> StepStream --> CoreLoop

Everything around the scheduling core runs as in the service; in place of the core stands one that
sends the next step when the result of the last one is back.
"""

import time
from collections.abc import Callable
from statistics import median

import anyio

from chip_worker import wire as worker_wire
from chip_worker.batch import RowResult, StepResult, StepTimes
from control_plane.core_loop import CoreLoop
from control_plane.dispatch import wire
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.wire import GroupSettings, Place
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
    WorkerInfo,
)
from scripts.control_cost.peer import PeerFailed, peer

TERM = 1
WORKERS = "scripts.control_cost.echoing_workers"
MESSAGE_BYTES_MAX = 64 << 20
QUIET_S = 3600.0
"""Between heartbeats: none comes while it is measured."""
ATTACH_DEADLINE_S = 60.0
STOP_S = 5.0
POLL_S = 0.01
WARM_UP_STEPS = 5
CODING_RUNS = 201


async def measure_transport(groups_count: int, rows_count: int, steps_count: int) -> list[float]:
    """Seconds of processor time, of all threads of this process, for each of `steps_count` steps:
    from a planned step to the event of its result, but for encoding and decoding.

    Raises PeerFailed.
    """
    core = _SendingCore(groups_count, rows_count)
    metrics = Metrics()
    loop = CoreLoop(
        core,
        time.perf_counter,
        deliver=lambda _: None,
        carry_out=lambda effect: dispatcher.carry_out(effect),
        condemn=lambda _: None,
        on_failure=lambda: None,
        metrics=metrics,
    )
    settings = GroupSettings(
        block_tokens=16,
        slots=rows_count,
        chunk_tokens=512,
        context_tokens=None,
        kv_policy="cover",
        step_deadline_s=QUIET_S,
    )
    dispatcher = Dispatcher(settings, TERM, loop.post, metrics.dispatch)
    server = WorkerServer(
        dispatcher,
        heartbeat_interval_s=QUIET_S,
        lease_s=2 * QUIET_S,
        message_bytes_max=MESSAGE_BYTES_MAX,
    )
    port = await server.start("127.0.0.1", 0)
    try:
        with peer(WORKERS, port, groups_count), anyio.fail_after(ATTACH_DEADLINE_S + steps_count):
            await core.attached.wait()
            core.begin(WARM_UP_STEPS * groups_count)
            loop.post(Tick())
            await core.finished.wait()
            core.begin(steps_count)
            loop.post(Tick())
            await core.finished.wait()
            dispatcher.shut_down_workers("it is measured")
            while dispatcher.attached_count:  # noqa: ASYNC110 - once, at the end
                await anyio.sleep(POLL_S)
    except TimeoutError as error:
        raise PeerFailed(
            f"{groups_count} workers in a process of their own did not answer {steps_count} steps"
        ) from error
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop(STOP_S)
    apart_s = core.coding_s()
    return [max(0.0, taken_s - apart_s) for taken_s in core.times_s]


class _SendingCore:
    """Takes the place of the scheduling core; steps go to the groups in turn."""

    def __init__(self, groups_count: int, rows_count: int) -> None:
        self.attached = anyio.Event()
        self.finished = anyio.Event()
        self.times_s: list[float] = []
        self._groups_count = groups_count
        self._rows_count = rows_count
        self._plans: list[StepPlan] = []
        self._workers: list[WorkerInfo] = []
        self._left = 0
        self._started_s = 0.0

    def begin(self, steps_count: int) -> None:
        """The next tick sends the first of so many steps."""
        self.finished = anyio.Event()
        self.times_s.clear()
        self._left = steps_count + 1
        self._started_s = time.process_time()

    def handle(self, event: Event, _now: float) -> list[Effect]:
        match event:
            case WorkerAttached(worker=worker):
                group_id, epoch = f"g{len(self._plans)}", len(self._plans) + 1
                self._plans.append(self._plan(group_id, epoch))
                self._workers.append(worker)
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
            case _:
                return []

    def snapshot(self, _now: float) -> Snapshot:
        raise AssertionError("nobody asks")

    def _next(self) -> list[Effect]:
        self._left -= 1
        if not self._left:
            self.finished.set()
            return []
        index = self._left % self._groups_count
        return [SendStep((self._workers[index].worker_id,), self._plans[index])]

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

    def coding_s(self) -> float:
        """What encoding a step and decoding its result take."""
        plan = self._plans[0]
        worker = self._workers[0]
        place = Place(plan.group_id, plan.epoch, 0)
        rows = tuple(RowResult((row.slot,), ()) for row in plan.rows)
        times = StepTimes(plan.step_id, device_ns=1)
        report = worker_wire.encode_report(StepResult(TERM, plan.epoch, plan.step_id, rows, times))
        return _median_s(lambda: wire.encode_step(plan, TERM)) + _median_s(
            lambda: wire.decode_report(report, worker, place)
        )


def _median_s(call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(CODING_RUNS):
        started_s = time.thread_time()
        call()
        times_s.append(time.thread_time() - started_s)
    return median(times_s)
