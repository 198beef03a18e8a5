"""Starts the control plane and the workers of this machine, keeps the workers alive, stops all.

All are started at once: a worker opens its chip while the control plane reads the model, then finds
the port in the file that the control plane announces it in.

control plane ends          -> stop the workers, exit with its status
worker ends with 0          -> it was asked to leave: leave it
no group can form any more  -> stop: requests would wait for ever
worker never becomes usable -> after so many starts in a row leave it alone
worker ends otherwise       -> start it again, after a pause that grows
verdict: a worker is frozen -> kill that process; the rule above starts it again
SIGTERM, SIGINT             -> the control plane drains and ends; a second one: end now

A worker was usable if the control plane knew its process when that ended, and as anything but
unavailable. START_FAILURES_MAX starts in a row without that, whether the service is ready or not,
are the last ones, and so are as many as the control plane takes faults: a further process would
only find its chip cordoned. A start that became usable sets the count back. Its group may go on
without it.
"""

import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import Process, TaskGroup

from chip_worker.exit_code import ExitCode
from chip_worker.plane_address import announced_ports
from control_plane.child_processes import RestartPause
from control_plane.settings import read_api_keys
from scripts.child_process import describe_exit, end_child, send_signal, start_child
from scripts.client import AdminWatcher, health
from scripts.progress import UNAVAILABLE, Progress
from scripts.settings import (
    ServeSettings,
    control_plane_command,
    dialled,
    worker_command,
    worker_id,
)

READY_POLL_S = 0.25
PROGRESS_POLL_S = 0.5
PROGRESS_POLL_READY_S = 2.0
DRAIN_MARGIN_S = 15.0
WORKER_GRACE_S = 10.0
START_FAILURES_MAX = 4
NOTICE_S = 3.0
"""The control plane notices within this that a process has ended."""
NOTICE_POLL_S = 0.1
LAST_LEFT_S = 3.0
"""A control plane that stops tells its workers to leave, and ends within this."""
LOST = "lost"
HOPELESS = (ExitCode.USAGE, ExitCode.REFUSED, ExitCode.MODEL_FAILED)


@dataclass(frozen=True)
class Addresses:
    """Where the control plane listens."""

    http_port: int
    grpc_port: int
    worker_port: int


class WorkerStarts:
    """The starts of one worker. pause: before it is started again.

    failures_max: so many starts in a row without becoming usable, which unusable_count counts, are
    the last ones. over: the worker is not started again: it left as asked, or ended in a way that
    starting it again would repeat.
    """

    def __init__(self, failures_max: int) -> None:
        self._failures_max = failures_max
        self.pause = RestartPause()
        self.unusable_count = 0
        self.over = False

    def count(self, usable: bool) -> bool:
        """Counts a start by whether the worker became usable; True if it was the last one."""
        self.unusable_count = 0 if usable else self.unusable_count + 1
        self.over = self.unusable_count >= self._failures_max
        return self.over


class Launcher:
    """One service on this machine. `report` takes lines for people; `on_ready` is called once, when
    /health first says 200."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        report: Callable[[str], None],
        on_ready: Callable[[Addresses], None],
        announce_path: Path | None = None,
    ) -> None:
        self._settings = settings
        self._report = report
        self._on_ready = on_ready
        self._announce_path = announce_path
        key_file = settings.api_key_file
        self._api_key = None if key_file is None else read_api_keys(key_file)[0]
        self._workers: dict[str, Process] = {}
        self._condemned: dict[str, int] = {}
        """The latest condemned incarnation of each worker."""
        failures_max = min(START_FAILURES_MAX, settings.control_plane.scheduling.own_faults_max)
        self._starts = {
            worker_id(i): WorkerStarts(failures_max) for i in range(settings.chips_count)
        }
        self._progress = Progress(report)
        self._ready = False
        self._signals_count = 0
        self._gave_up = False

    async def run(self) -> int:
        """Runs the service to its end; the exit status for the shell."""
        with tempfile.TemporaryDirectory(prefix="polychip-") as folder:
            announce_path = self._announce_path or Path(folder) / "announce.json"
            # What a symbolic link leads to: the control plane writes there too.
            announced = await anyio.Path(announce_path).resolve()
            await announced.unlink(missing_ok=True)
            control_plane = await start_child(
                control_plane_command(self._settings, str(announce_path))
            )
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_signals, tasks, control_plane)
                    tasks.start_soon(self._serve, control_plane, announce_path)
                    code = await control_plane.wait()
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await end_child(control_plane, grace_s=0.0)
                    await self._stop_workers()
        return self._exit_status(code)

    async def _serve(self, control_plane: Process, announce_path: Path) -> None:
        plane = _ControlPlane(control_plane, announce_path)
        try:
            async with anyio.create_task_group() as tasks:
                for chip_index in range(self._settings.chips_count):
                    tasks.start_soon(self._keep_worker, chip_index, plane)
                addresses = await _announced(announce_path)
                self._report(
                    f"control plane listens: http {addresses.http_port}, "
                    f"grpc {addresses.grpc_port}, workers {addresses.worker_port}"
                )
                admin = plane.listens(
                    dialled(self._settings.host), addresses.grpc_port, self._api_key
                )
                await self._start_watching(tasks, admin, addresses)
        finally:
            with anyio.CancelScope(shield=True):
                await plane.close()

    async def _start_watching(
        self, tasks: TaskGroup, admin: AdminWatcher, addresses: Addresses
    ) -> None:
        tasks.start_soon(self._watch_verdicts, admin)
        tasks.start_soon(self._report_progress, admin)
        await _healthy(dialled(self._settings.host), addresses.http_port)
        # Who serves is told before.
        await self._progress.look(admin)
        self._ready = True
        self._on_ready(addresses)

    async def _keep_worker(self, chip_index: int, plane: "_ControlPlane") -> None:
        name = worker_id(chip_index)
        command = worker_command(self._settings, chip_index, f"@{plane.announce_path}")
        starts = self._starts[name]
        while True:
            started = time.monotonic()
            process = self._workers[name] = await start_child(command)
            code = await process.wait()
            pause_s = starts.pause.next_s(time.monotonic() - started)
            said = f"{name} {described_exit(code)}"
            if code == ExitCode.LEFT or code in HOPELESS:
                starts.over = True
            elif starts.count(await _was_usable(await plane.admin(), name, process.pid)):
                said += f" and was not usable in {starts.unusable_count} starts"
            if not self._group_may_serve():
                self._report(said)
                await self._give_up(plane.process)
                return
            if starts.over:
                # Nobody expects it to be when all stops.
                self._report(said if self._signals_count else f"{said}; it is not started again")
                return
            self._report(f"{said}; starting it again in {pause_s:g} s")
            await anyio.sleep(pause_s)

    def _group_may_serve(self) -> bool:
        """False once no group can form: every group lacks a worker or, with fewer chips, all."""
        starts = iter(self._starts.values())
        groups = [list(islice(starts, size)) for size in self._settings.group_sizes]
        lacks = all if self._settings.control_plane.scheduling.fewer_chips else any
        return not all(lacks(each.over for each in group) for group in groups)

    async def _give_up(self, control_plane: Process) -> None:
        """Ends a service that cannot serve any more: requests would wait for ever."""
        await anyio.sleep(LAST_LEFT_S)
        if not (self._signals_count or self._gave_up):
            self._gave_up = True
            self._report("no group can form again, stopping")
            over = [name for name, starts in self._starts.items() if starts.over]
            for line in self._progress.reasons_of(over):
                self._report(line)
            send_signal(control_plane, signal.SIGTERM)

    async def _watch_verdicts(self, admin: AdminWatcher) -> None:
        while True:
            async for verdict in admin.verdicts():
                name, pid = verdict.worker_id, verdict.pid
                # Whoever is asked anew tells it again, when a new process may have the same id.
                if self._condemned.get(name) == verdict.incarnation:
                    continue
                self._condemned[name] = verdict.incarnation
                process = self._workers.get(name)
                # Only that incarnation: a newer process under the name is innocent.
                if process is not None and process.pid == pid and process.returncode is None:
                    self._report(f"{name} (process {pid}) is killed: {verdict.reason}")
                    send_signal(process, signal.SIGKILL)
            await anyio.sleep(1.0)

    async def _watch_signals(self, tasks: TaskGroup, control_plane: Process) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                self._signals_count += 1
                if self._signals_count > 1:
                    send_signal(control_plane, signal.SIGKILL)
                else:
                    self._report(f"{number.name}: finishing what runs; a second one ends at once")
                    tasks.start_soon(end_child, control_plane, self._drain_grace_s())

    def _drain_grace_s(self) -> float:
        """How long the control plane may take to end: its own deadline and a margin."""
        return self._settings.control_plane.drain_deadline_s + DRAIN_MARGIN_S

    async def _report_progress(self, admin: AdminWatcher) -> None:
        """A line whenever the state of a worker or a group changes, as long as we serve."""
        while True:
            await self._progress.look(admin)
            await anyio.sleep(PROGRESS_POLL_READY_S if self._ready else PROGRESS_POLL_S)

    async def _stop_workers(self) -> None:
        grace_s = 0.0 if self._signals_count > 1 else WORKER_GRACE_S
        async with anyio.create_task_group() as tasks:
            for process in self._workers.values():
                tasks.start_soon(end_child, process, grace_s)

    def _exit_status(self, control_plane_code: int) -> int:
        if self._gave_up:
            return 1
        if self._signals_count > 1:
            return 1
        if self._signals_count == 1 and control_plane_code == -signal.SIGTERM:
            return 0
        if control_plane_code != 0:
            self._report(f"the control plane {describe_exit(control_plane_code)}")
        return control_plane_code if control_plane_code >= 0 else 128 - control_plane_code


class _ControlPlane:
    """The child process, and its admin service once it listens."""

    def __init__(self, process: Process, announce_path: Path) -> None:
        self.process = process
        self.announce_path = announce_path
        self._listening = anyio.Event()
        self._admin: AdminWatcher | None = None

    def listens(self, host: str, grpc_port: int, api_key: str | None) -> AdminWatcher:
        """It was announced; nothing else may call the admin service before."""
        self._admin = AdminWatcher(host, grpc_port, api_key)
        self._listening.set()
        return self._admin

    async def admin(self) -> AdminWatcher:
        """Waits until it listens."""
        await self._listening.wait()
        assert self._admin is not None
        return self._admin

    async def close(self) -> None:
        """Running calls of the admin service end."""
        if self._admin is not None:
            await self._admin.close()


def was_usable(status: Mapping[str, object], name: str, pid: int) -> bool | None:
    """Whether the control plane had a use for a process that has ended; None: it seems to live."""
    workers = status["workers"]
    assert isinstance(workers, list)
    for worker in workers:
        if (worker["id"], worker["pid"]) == (name, pid):
            return {UNAVAILABLE: False, LOST: True}.get(worker["state"])
    return False


async def _was_usable(admin: AdminWatcher, name: str, pid: int) -> bool:
    """Asks until the end of the process is noticed; what is not known is not held against it."""
    with anyio.move_on_after(NOTICE_S):
        while True:
            status = await admin.status()
            usable = None if status is None else was_usable(status, name, pid)
            if usable is not None:
                return usable
            await anyio.sleep(NOTICE_POLL_S)
    return True


def described_exit(code: int) -> str:
    """The end of a worker in words, with the name of its exit code."""
    named = f" ({ExitCode(code).name})" if code in set(ExitCode) else ""
    return f"{describe_exit(code)}{named}"


async def _announced(path: Path) -> Addresses:
    ports = await announced_ports(path)
    return Addresses(ports["http_port"], ports["grpc_port"], ports["worker_port"])


async def _healthy(host: str, http_port: int) -> None:
    """Waits until /health says 200."""
    while True:
        answer = await anyio.to_thread.run_sync(health, host, http_port)
        if answer is not None and answer[0] == HTTPStatus.OK:
            return
        await anyio.sleep(READY_POLL_S)
