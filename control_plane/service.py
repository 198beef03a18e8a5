"""The control plane's process: intake and dispatch around the core, from first to last byte.

Start: worker port, client ports, announcement. Stop (SIGTERM, SIGINT): no new requests, running
ones finish or reach the drain deadline, workers leave, servers close. A second one stops at once,
and so does one that comes before the client ports are open.
"""

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import anyio
import structlog
from anyio.abc import TaskGroup

from control_plane.config import ControlPlaneConfig
from control_plane.core_loop import Core, CoreLoop
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.wire import GroupSettings
from control_plane.dispatch.worker_server import WorkerServer
from control_plane.errors import ConfigurationError
from control_plane.frontends.front_processes import FrontProcesses
from control_plane.frontends.request_sums import RequestSums
from control_plane.intake.front import Intake, IntakePorts
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.whole_service import LocalService
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import Condemn, Effect
from control_plane.snapshot_metrics import SnapshotCollector
from control_plane.whole_file import write_whole

WORKERS_GRACE_S = 5.0
"""How long workers may take to finish a step and say Goodbye."""
WORKERS_HURRIED_S = 0.5
"""How long they have at least to hear that they are to leave."""
STOP_S = 8.0
"""Most time the servers may take to close; beyond it the process ends with them open."""
STOP_HURRIED_S = 1.0
DRAIN_POLL_S = 0.1

SERVICE_LISTENING = "service.listening"
SERVICE_INTERRUPTED = "service.interrupted"
SERVICE_DRAINING = "service.draining"
SERVICE_STOPPED = "service.stopped"
CONTEXT_CUT = "service.context_cut"

_log = structlog.get_logger()


class ClientIntake(Protocol):
    """Intake as the service sees it: an Intake in this process, or FrontProcesses around several.

    All methods are for the event loop's thread.
    """

    @property
    def vocabulary_tokens(self) -> int:
        """Ids from there on do not exist for any client, though the model may draw them."""

    @property
    def running_count(self) -> int:
        """Calls some client still waits for or reads."""

    @property
    def drained(self) -> bool:
        """Whether no call is left, and, once new ones are refused, none can get in any more."""

    async def start(self, tasks: TaskGroup) -> IntakePorts:
        """Returns once clients are taken; `tasks` runs the rest until `stop`.

        Raises ConfigurationError if it cannot be. May be cancelled; `stop` follows all the same.
        """

    async def stop(self) -> None:
        """Ends every answer still running with UNAVAILABLE, then closes the ports."""

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core; those that are not for intake are ignored."""

    def publish_verdict(self, condemn: Condemn) -> None:
        """Tells every launcher that watches, now or later, that this process must be killed."""

    def refuse_new(self, reason: str) -> None:
        """From now on new requests get UNAVAILABLE with this reason; health says not serving."""


class Service:
    """One control plane; raises ConfigurationError if the model's files do not allow it.

    term: the least term to serve under. clock: monotonic seconds. `run` serves once.
    """

    def __init__(
        self,
        config: ControlPlaneConfig,
        core: Core,
        model: ModelFiles,
        *,
        term: int,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._failed = False
        self._hurried = False
        self._interrupted = False
        self._serving = anyio.CancelScope()
        sums = RequestSums() if config.frontends else None
        self._metrics = Metrics(sums)
        self._core_loop = CoreLoop(
            core,
            clock,
            deliver=lambda effect: self._intake.deliver(effect),
            carry_out=lambda effect: self._dispatcher.carry_out(effect),
            condemn=lambda effect: self._intake.publish_verdict(effect),
            on_failure=self._fail,
            metrics=self._metrics,
        )
        post, snapshot = self._core_loop.post, self._core_loop.snapshot
        self._intake = self._intake_of(model, clock, sums)
        settings = group_settings(config, self._intake.vocabulary_tokens)
        self._dispatcher = Dispatcher(settings, term, post, self._metrics.dispatch)
        self._metrics.register(SnapshotCollector(snapshot, lambda: self._intake.running_count))
        self._metrics.describe(
            version=version("polychip"),
            model_name=config.model_name or model.name,
            architecture=model.architecture,
        )
        _warn_of_context(config, model)

    def _intake_of(
        self, model: ModelFiles, clock: Callable[[], float], sums: RequestSums | None
    ) -> ClientIntake:
        """In this process, or in processes of its own whose counts `sums` holds."""
        config, metrics = self._config, self._metrics
        post, snapshot = self._core_loop.post, self._core_loop.snapshot
        if sums is None:
            service = LocalService(snapshot, self._term, metrics.expose)
            return Intake(config, model, post, service, clock, metrics=metrics)
        return FrontProcesses(config, model, post, snapshot, self._term, metrics=metrics, sums=sums)

    def _term(self) -> int:
        return self._dispatcher.term

    async def run(self) -> bool:
        """Serves until a signal; True if it ended as asked, False if the core failed.

        Raises ConfigurationError if a port cannot be had, or the announcement not be written.
        """
        workers = self._worker_server()
        worker_port = await workers.start(self._config.worker_host, self._config.worker_port)
        refused: ConfigurationError | None = None
        # Before the ports are announced: whoever reads them may send a signal at once.
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as tasks:
                try:
                    with self._serving:
                        ports = await self._start_intake(tasks, signals)
                        if ports is not None:
                            await self._announce(ports, worker_port)
                            await self._watch(signals)
                # A task group would wrap it; it is for people to read.
                except ConfigurationError as error:
                    refused = error
                finally:
                    await self._stop(workers, tasks, signals)
                    tasks.cancel_scope.cancel()
        if refused is not None:
            raise refused
        _log.info(SERVICE_STOPPED, failed=self._failed, counters=asdict(self._metrics.dispatch))
        return not self._failed

    async def _start_intake(
        self, tasks: TaskGroup, signals: AsyncIterator[signal.Signals]
    ) -> IntakePorts | None:
        """Opens the client ports; None if a signal came first. Raises ConfigurationError."""
        ports: IntakePorts | None = None
        refused: ConfigurationError | None = None
        async with anyio.create_task_group() as starting:
            starting.start_soon(self._interrupt, signals, starting.cancel_scope)
            try:
                ports = await self._intake.start(tasks)
            except ConfigurationError as error:  # as in `run`
                refused = error
            starting.cancel_scope.cancel()
        if refused is not None:
            raise refused
        return None if self._interrupted else ports

    async def _interrupt(
        self, signals: AsyncIterator[signal.Signals], starting: anyio.CancelScope
    ) -> None:
        async for number in signals:
            _log.info(SERVICE_INTERRUPTED, signal=number.name)
            self._interrupted = True
            starting.cancel()

    def _worker_server(self) -> WorkerServer:
        return WorkerServer(
            self._dispatcher,
            heartbeat_interval_s=self._config.scheduling.heartbeat_interval_s,
            lease_s=self._config.scheduling.lease_s,
            message_bytes_max=self._config.worker_message_bytes_max,
            join_token=self._config.join_token,
        )

    def _fail(self) -> None:
        self._failed = self._hurried = True
        self._serving.cancel()

    async def _announce(self, ports: IntakePorts, worker_port: int) -> None:
        """Writes the ports where the launcher looks for them; a reader never sees half a file.

        Raises ConfigurationError if they cannot be written there.
        """
        listening = {
            "http_port": ports.http_port,
            "grpc_port": ports.grpc_port,
            "worker_port": worker_port,
            "pid": os.getpid(),
        }
        if self._config.announce_path is not None:
            path = Path(self._config.announce_path)
            try:
                await anyio.to_thread.run_sync(write_whole, path, json.dumps(listening))
            except OSError as error:
                raise ConfigurationError(
                    f"--announce {path} cannot be written: {error.strerror}; give a file in a "
                    "folder that exists"
                ) from error
        _log.info(SERVICE_LISTENING, term=self._dispatcher.term, **listening)

    async def _watch(self, signals: AsyncIterator[signal.Signals]) -> None:
        """Returns when the service is drained after the first signal, or at the second."""
        async with anyio.create_task_group() as tasks:
            async for number in signals:
                if self._hurried:
                    break
                self._hurried = True
                _log.info(SERVICE_DRAINING, signal=number.name)
                tasks.start_soon(self._drain, tasks.cancel_scope)
            tasks.cancel_scope.cancel()

    async def _drain(self, scope: anyio.CancelScope) -> None:
        """Waits for running requests; cancels `scope` when there is nothing left to wait for."""
        self._intake.refuse_new("the service is draining; ask another one or come back later")
        with anyio.move_on_after(self._config.drain_deadline_s):
            await _wait_for(lambda: self._intake.drained)
        self._hurried = False
        scope.cancel()

    async def _stop(
        self, workers: WorkerServer, tasks: TaskGroup, signals: AsyncIterator[signal.Signals]
    ) -> None:
        """Ends what is left, in order: answers and client servers, workers, their server."""
        deadline_s = STOP_HURRIED_S if self._hurried else STOP_S
        with anyio.move_on_after(deadline_s, shield=True) as polite:
            tasks.start_soon(_hurry_at_signal, signals, polite)
            try:
                await self._intake.stop()
            finally:
                # Also when time was too short for all answers.
                self._dispatcher.shut_down_workers("the control plane stops")
            with anyio.move_on_after(WORKERS_GRACE_S):
                await _wait_for(lambda: self._dispatcher.attached_count == 0)
        self._core_loop.close()
        with anyio.move_on_after(STOP_HURRIED_S, shield=True):
            await workers.stop(WORKERS_HURRIED_S)


async def _hurry_at_signal(
    signals: AsyncIterator[signal.Signals], polite: anyio.CancelScope
) -> None:
    async for _ in signals:
        polite.deadline = min(polite.deadline, anyio.current_time() + STOP_HURRIED_S)


async def _wait_for(condition: Callable[[], bool]) -> None:
    # Only while stopping: not worth an event on every path that ends a request or a stream.
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(DRAIN_POLL_S)


def _warn_of_context(config: ControlPlaneConfig, model: ModelFiles) -> None:
    asked = config.scheduling.context_tokens
    if asked is not None and asked > model.context_tokens:
        _log.warning(CONTEXT_CUT, asked_tokens=asked, model_tokens=model.context_tokens)


def group_settings(config: ControlPlaneConfig, vocabulary_tokens: int) -> GroupSettings:
    """What the configuration says to every worker that joins a group.

    vocabulary_tokens: ids from there on do not exist for any client.
    """
    scheduling = config.scheduling
    return GroupSettings(
        block_tokens=scheduling.block_tokens,
        slots=scheduling.running_max,
        chunk_tokens=scheduling.chunk_tokens,
        context_tokens=scheduling.context_tokens,
        kv_policy=config.kv_policy,
        step_deadline_s=scheduling.step_deadline_s,
        vocabulary_tokens=vocabulary_tokens,
        probe_deadline_s=scheduling.probe_deadline_s,
    )
