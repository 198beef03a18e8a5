"""The frontend processes of a control plane: started, watched, started again, stopped.

a frontend ends        -> what it asked for is cancelled; it starts again after a pause that grows
it does not answer     -> it is frozen: it is killed, and the above holds
it takes no clients    -> after a deadline it is killed, and the below holds
it cannot start at all -> at the start of the service: ConfigurationError; later: as above
the service drains     -> frontends refuse new calls; one that ends now stays away
"""

import logging
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from subprocess import DEVNULL
from typing import NamedTuple

import anyio
import structlog
from anyio.abc import TaskGroup
from google.protobuf.message import DecodeError

from control_plane.child_processes import STANDARD_ERROR, RestartPause
from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError, ProtocolError
from control_plane.frontends import wire
from control_plane.frontends.frame_link import FrameLink
from control_plane.frontends.front_hub import Frontend, FrontHub
from control_plane.frontends.request_sums import RequestSums
from control_plane.frontends.shared_ports import held_ports
from control_plane.intake import admin_wire
from control_plane.intake.admin_wire import FrontendSnapshot
from control_plane.intake.front import STOPPED, IntakePorts, vocabulary_tokens
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.release import VERSION
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import Condemn, Effect, Event, Snapshot
from control_plane.scheduling.name_order import name_order

PING_INTERVAL_S = 10.0
PINGS_MISSED_MAX = 2
"""A frontend that misses so many pings in a row is frozen; one may be this process's own stall."""
LEAVE_S = 1.0
"""How long a process may take to end once its stream has."""
STOP_S = 5.0
"""How long `stop` lets processes answer what is open and end: less than the service has to stop,
whose workers must be told to leave as well."""

FRONTEND_LISTENING = "frontend.listening"
FRONTEND_LOST = "frontend.lost"
FRONTEND_FROZEN = "frontend.frozen"
FRONTEND_LATE = "frontend.late"
MESSAGE_REFUSED = "frontend.message_refused"

_log = structlog.get_logger()


class _Running(NamedTuple):
    """A process that has not ended, and what the hub knows it as."""

    process: Process
    frontend: Frontend


class FrontProcesses:
    """Intake in `config.frontends` processes, as the service sees it: the same as an Intake.

    post, snapshot, term: the core's, as for an Intake in this process. metrics: made with `sums`.
    Construction raises ConfigurationError if the model's files do not allow to serve it.
    """

    def __init__(
        self,
        config: ControlPlaneConfig,
        model: ModelFiles,
        post: Callable[[Event], None],
        snapshot: Callable[[], Snapshot],
        term: Callable[[], int],
        *,
        metrics: Metrics,
        sums: RequestSums,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self.vocabulary_tokens = vocabulary_tokens(config, model)
        """Ids from there on do not exist for any client, though the model may draw them."""

        def status(calls_count: int) -> bytes:
            message = admin_wire.status_response(
                snapshot(),
                intake_count=calls_count,
                term=term(),
                version=VERSION,
                frontends=self._snapshots(),
            )
            return message.SerializeToString()

        self._hub = FrontHub(post, status, metrics.expose, sums)
        self._running: dict[str, _Running] = {}
        self._lost: dict[str, Process] = {}
        """The latest process of a name that ended unasked."""
        self._starting: set[str] = set()
        """Those that have not listened since the service began."""
        self._refusal: str | None = None
        self._settled = anyio.Event()
        self._stopping = False
        self._ports = ExitStack()

    async def start(self, tasks: TaskGroup) -> IntakePorts:
        """Returns once all take clients; `tasks` runs them until `stop`, which may come before.

        Raises ConfigurationError if a port cannot be had or a frontend cannot start.
        """
        ports = self._ports.enter_context(held_ports(self._config))
        config = replace(
            self._config,
            http_port=ports.http_port,
            grpc_port=ports.grpc_port,
            join_token=None,
            announce_path=None,
        )
        names = [f"frontend{index}" for index in range(config.frontends)]
        self._starting.update(names)
        for name in names:
            tasks.start_soon(self._keep, name, wire.start_message(config))
        await self._settled.wait()
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        return ports

    async def stop(self) -> None:
        """Ends every answer still running with UNAVAILABLE, and the processes; those that do not
        take clients yet, and what is left after `STOP_S` or when cut short, it kills."""
        self._stopping = True
        running = [*self._running.values()]
        try:
            self._hub.stop(STOPPED)
            for each in running:
                if not each.frontend.listening:
                    _kill(each.process)
            with anyio.move_on_after(STOP_S):
                for each in running:
                    await each.process.wait()
        finally:
            for each in running:
                _kill(each.process)
            self._ports.close()

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core; those that are not for intake are ignored."""
        self._hub.deliver(effect)

    def publish_verdict(self, condemn: Condemn) -> None:
        """Tells every launcher that watches, now or later, that this process must be killed."""
        self._hub.publish_verdict(condemn)

    @property
    def running_count(self) -> int:
        """Calls some client still waits for or reads."""
        return self._hub.calls_count

    @property
    def drained(self) -> bool:
        """Whether no call is left, and none can get in any more."""
        return self._hub.drained

    def refuse_new(self, reason: str) -> None:
        """From now on new requests get UNAVAILABLE with this reason; health says not serving."""
        self._hub.refuse_new(reason)

    # ---------------------------------------------------------------- inside

    def _snapshots(self) -> list[FrontendSnapshot]:
        names = sorted({*self._running, *self._lost}, key=name_order)
        return [self._snapshot(name) for name in names]

    def _snapshot(self, name: str) -> FrontendSnapshot:
        running, lost = self._running.get(name), self._lost.get(name)
        state = "lost"
        if running is not None:
            state = "listening" if running.frontend.listening else "starting"
        return FrontendSnapshot(
            name=name,
            pid=0 if running is None else running.process.pid,
            state=state,
            lost_pid=0 if lost is None else lost.pid,
            lost_status=0 if lost is None else lost.returncode or 0,
        )

    async def _keep(self, name: str, start: bytes) -> None:
        """Runs a frontend again and again."""
        pause = RestartPause()
        while not self._stopping and not self._hub.refuses_new:
            began = anyio.current_time()
            refusal = await self._run(name, start)
            if name in self._starting:
                self._refusal = refusal
                self._settled.set()
                return
            if not self._stopping:
                self._metrics.frontend_lost()
            await anyio.sleep(pause.next_s(anyio.current_time() - began))

    async def _run(self, name: str, start: bytes) -> str:
        """Runs a frontend from its start to its end; returns why it would not serve."""
        ours, theirs = socket.socketpair()
        with ExitStack() as ends:
            ends.enter_context(theirs)
            link = await FrameLink.over(ours)
            ends.callback(link.abort)
            try:
                process = await _start(name, theirs)
            except OSError as error:
                _log.warning(FRONTEND_LOST, name=name, error=error.strerror)
                return f"{name} cannot be started: {error.strerror}"
            theirs.close()  # or the stream would not end with the process
            link.send(start)
            return await self._attend(Frontend(name, link.send), link, process)

    async def _attend(self, frontend: Frontend, link: FrameLink, process: Process) -> str:
        """From the first message of a process to its end; returns why it would not serve."""
        name = frontend.name
        self._running[name] = _Running(process, frontend)
        self._hub.attach(frontend)
        if self._stopping:
            _kill(process)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._kill_if_late, frontend, process)
                await self._listen(frontend, link, process, tasks)
                tasks.cancel_scope.cancel()
        finally:
            link.abort()
            calls_count = self._hub.detach(frontend)
            self._metrics.frontends_listening(self._hub.listening_count)
            await _end(process)
            del self._running[name]
        if not self._stopping:
            self._lost[name] = process
            _log.warning(
                FRONTEND_LOST, name=name, status=process.returncode, calls_cancelled=calls_count
            )
        return frontend.refusal or (
            f"{name} ended with status {process.returncode} before it served; its log says why"
        )

    async def _kill_if_late(self, frontend: Frontend, process: Process) -> None:
        deadline_s = self._config.frontend_start_deadline_s
        await anyio.sleep(deadline_s)
        if not frontend.listening:
            _log.error(FRONTEND_LATE, name=frontend.name, pid=process.pid, deadline_s=deadline_s)
            frontend.refusal = (
                f"{frontend.name} did not take requests within {deadline_s:g} s of its start; give "
                "it longer with --frontend-start-deadline, or start fewer with --frontends"
            )
            _kill(process)

    async def _listen(
        self, frontend: Frontend, link: FrameLink, process: Process, tasks: TaskGroup
    ) -> None:
        """Takes what a frontend says, until it ends or breaks the protocol."""
        try:
            async for data in link.messages():
                listened = frontend.listening
                self._hub.take(frontend, data)
                if frontend.listening and not listened:
                    _log.info(FRONTEND_LISTENING, name=frontend.name, pid=process.pid)
                    # Not before: building a tokenizer takes its loop for seconds.
                    tasks.start_soon(_kill_if_frozen, frontend, process)
                    self._metrics.frontends_listening(self._hub.listening_count)
                    self._starting.discard(frontend.name)
                    if not self._starting:
                        self._settled.set()
        except (DecodeError, ProtocolError) as error:
            _log.error(MESSAGE_REFUSED, name=frontend.name, error=str(error))


async def _start(name: str, end: socket.socket) -> Process:
    level = logging.getLogger().getEffectiveLevel()
    command = [sys.executable, "-m", "control_plane.frontends", "--name", name]
    command += ["--link", str(end.fileno()), "--log-level", str(level)]
    return await create_subprocess_exec(
        *command,
        stdin=DEVNULL,
        stdout=STANDARD_ERROR,
        stderr=None,
        # A Ctrl-C of the terminal is for this process, which drains.
        start_new_session=True,
        pass_fds=[end.fileno()],
    )


async def _kill_if_frozen(frontend: Frontend, process: Process) -> None:
    missed_count = 0
    while missed_count < PINGS_MISSED_MAX:
        frontend.ping()
        await anyio.sleep(PING_INTERVAL_S)
        missed_count = 0 if frontend.answered else missed_count + 1
    _log.error(FRONTEND_FROZEN, name=frontend.name, pid=process.pid)
    _kill(process)


async def _end(process: Process) -> None:
    """A process whose stream ended is about to end too; one that does not is killed."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(LEAVE_S):
            await process.wait()
        _kill(process)
        await process.wait()


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
