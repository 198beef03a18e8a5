"""One group of chips, formed and driven as the control plane does it, to time steps of known work.

    compute(Work) --StepPlan--> Dispatcher, WorkerServer --stream--> workers of the launcher's kind
                 <--StepDone, the chips' own time--

Rank 0 tells how long the chips worked: what planning, sending and this process take is not in it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from math import lcm

import anyio
from anyio.abc import Process

from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.wire import GroupSettings
from control_plane.dispatch.worker_server import WorkerServer
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    Event,
    FormGroup,
    Heartbeat,
    RendezvousOpened,
    SendRendezvous,
    SendStep,
    StepDone,
    StepPlan,
    WorkerAttached,
    WorkerFaulted,
    WorkerInfo,
    WorkerLost,
    WorkerReady,
)
from scripts.child_process import end_child, start_child
from scripts.launcher import described_exit
from scripts.settings import ServeSettings, worker_command, worker_id

TERM = EPOCH = 1
GROUP_ID = "g0"
EVENTS_MAX = 4096
POLL_S = 0.2
"""How soon it is noticed that a worker's process has ended."""
LAST_WORDS_S = 2.0
"""A process whose stream ended gets so long to end, so that its exit status can be told."""
LEAVE_S = 5.0
"""Workers that are asked to leave get so long, then they are ended."""
TERMINATE_S = 2.0
DEADLINE_MARGIN_S = 5.0
"""Workers keep the deadlines themselves, and know better what was late."""


class CalibrationFailed(Exception):
    """A worker cannot do what is to be measured; says which one, and why."""


class MeasuredGroup:
    """A group that is ready for steps, one at a time.

    worker: rank 0 as it introduced itself. slots: most rows of a step, no more than its chips
    accept. blocks: KV blocks of the smallest pool, of `block_tokens` tokens. prefill_tokens_per_s:
    what the warm-up measured.
    """

    def __init__(self, settings: ServeSettings, slots: int, chunk_tokens: int) -> None:
        config = settings.control_plane.scheduling
        self.worker: WorkerInfo
        self.block_tokens = config.block_tokens
        self.blocks = 0
        self.prefill_tokens_per_s = 0.0
        self._settings = settings
        self._config = config
        self.slots = slots
        self._events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)
        self._processes: dict[str, Process] = {}
        self._step_id = 0
        form = GroupSettings(
            block_tokens=config.block_tokens,
            slots=slots,
            chunk_tokens=chunk_tokens,
            context_tokens=config.context_tokens,
            kv_policy=settings.control_plane.kv_policy,
            step_deadline_s=config.step_deadline_s,
            probe_deadline_s=config.probe_deadline_s,
        )
        self.dispatcher = Dispatcher(form, TERM, self._post, Metrics().dispatch)

    async def compute(self, plan: StepPlan) -> float:
        """Sends a step, numbered here, and returns the seconds the chips worked on it.

        Raises CalibrationFailed.
        """
        self._step_id += 1
        plan = replace(plan, group_id=GROUP_ID, epoch=EPOCH, step_id=self._step_id)
        self.dispatcher.carry_out(SendStep(tuple(self._processes), plan))
        with self._within(self._config.step_deadline_s, "a step", "--step-deadline"):
            while not isinstance(event := await self._next(), StepDone):
                pass
        return event.device_s

    # ------------------------------------------------------------ forming

    async def start(self, worker_port: int) -> None:
        """Starts the workers and forms the group. Raises CalibrationFailed."""
        for index in range(self._settings.group_sizes[0]):
            command = worker_command(self._settings, index, str(worker_port))
            self._processes[worker_id(index)] = await start_child(command)
        deadline_s = self._config.start_deadline_s
        with self._within(deadline_s, "the workers' start", "--start-deadline"):
            workers = await self._attached()
        self.worker = workers[0]
        multiples = [worker.block_tokens_multiple for worker in workers]
        self.block_tokens = lcm(self._config.block_tokens, *multiples)
        for worker in workers:
            if 0 < worker.rows_max < self.slots:
                self.slots = worker.rows_max
        deadline_s = self._config.formation_deadline_s
        with self._within(deadline_s, "forming the group", "--formation-deadline"):
            await self._form(workers)

    async def _attached(self) -> list[WorkerInfo]:
        """All workers, in the order of their ranks."""
        found: dict[str, WorkerInfo] = {}
        while len(found) < len(self._processes):
            event = await self._next()
            if isinstance(event, WorkerAttached) and event.worker.worker_id in self._processes:
                worker = event.worker
                if worker.unavailable_reason is not None:
                    raise CalibrationFailed(
                        f"{worker.worker_id} is unavailable: {worker.unavailable_reason}"
                    )
                found[worker.worker_id] = worker
        return [found[name] for name in self._processes]

    async def _form(self, workers: list[WorkerInfo]) -> None:
        for rank, worker in enumerate(workers):
            form = FormGroup(
                worker.worker_id,
                worker.incarnation,
                GROUP_ID,
                EPOCH,
                rank,
                len(workers),
                deadline_s=self._config.formation_deadline_s,
                block_tokens=self.block_tokens,
                slots=self.slots,
            )
            self.dispatcher.carry_out(form)
        ready: dict[str, WorkerReady] = {}
        while len(ready) < len(workers):
            match await self._next():
                case RendezvousOpened(address=address):
                    for other in workers[1:]:
                        self.dispatcher.carry_out(
                            SendRendezvous(other.worker_id, other.incarnation, EPOCH, address)
                        )
                case WorkerReady() as event:
                    ready[event.worker_id] = event
                case _:
                    pass
        self.blocks = min(event.blocks for event in ready.values())
        self.prefill_tokens_per_s = ready[workers[0].worker_id].prefill_tokens_per_s

    # ------------------------------------------------------------ events and ends

    def _post(self, event: Event) -> None:
        if not isinstance(event, Heartbeat):
            self._events.put_nowait(event)

    async def _next(self) -> Event:
        """The next event. Raises CalibrationFailed if it is the end of a worker."""
        event: Event | None = None
        while event is None:
            with anyio.move_on_after(POLL_S):
                event = await self._events.get()
            if event is None:
                for name in self._processes:
                    self._check_runs(name)
        match event:
            case WorkerFaulted(worker_id=name, message=message):
                raise CalibrationFailed(f"{name}: {message}")
            case WorkerLost(worker_id=name, message=message) if name in self._processes:
                with anyio.move_on_after(LAST_WORDS_S):
                    await self._processes[name].wait()
                self._check_runs(name)
                raise CalibrationFailed(f"{name} was lost: {message}")
            case _:
                return event

    def _check_runs(self, name: str) -> None:
        code = self._processes[name].returncode
        if code is not None:
            raise CalibrationFailed(f"{name} {described_exit(code)}; its log, above, says why")

    @contextmanager
    def _within(self, deadline_s: float, what: str, option: str) -> Iterator[None]:
        try:
            with anyio.fail_after(deadline_s + DEADLINE_MARGIN_S):
                yield
        except TimeoutError as error:
            raise CalibrationFailed(
                f"{what} took more than {deadline_s:g} s; allow more with {option}"
            ) from error

    async def end(self) -> None:
        """Asks the workers to leave, and ends those that do not."""
        self.dispatcher.shut_down_workers("what was to be measured is measured")
        async with anyio.create_task_group() as tasks:
            for process in self._processes.values():
                tasks.start_soon(_end, process)


async def _end(process: Process) -> None:
    with anyio.move_on_after(LEAVE_S):
        await process.wait()
    await end_child(process, TERMINATE_S)


@asynccontextmanager
async def open_group(
    settings: ServeSettings, slots: int, chunk_tokens: int
) -> AsyncIterator[MeasuredGroup]:
    """The first group of a service, started as `polychip serve` starts it.

    slots: most rows of a step; chunk_tokens: most tokens of a chunk. Its workers end with the
    block. Raises CalibrationFailed if the group cannot form.
    """
    group = MeasuredGroup(settings, slots, chunk_tokens)
    config = settings.control_plane
    server = WorkerServer(
        group.dispatcher,
        heartbeat_interval_s=config.scheduling.heartbeat_interval_s,
        lease_s=config.scheduling.lease_s,
        message_bytes_max=config.worker_message_bytes_max,
    )
    try:
        await group.start(await server.start(config.worker_host, 0))
        yield group
    finally:
        with anyio.CancelScope(shield=True):
            await group.end()
            await server.stop(0)
