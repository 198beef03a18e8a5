"""Frontends that cannot start, do so too slowly, or are told to stop then or while frozen.

What they are told while one is away reaches its successor.
"""

import os
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import Process, create_subprocess_exec
from dataclasses import replace

import anyio
import grpc
import pytest
from structlog.testing import capture_logs

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError
from control_plane.frontends import front_processes
from control_plane.frontends.front_processes import FrontProcesses
from control_plane.frontends.request_sums import RequestSums
from control_plane.intake.model_files import ModelFiles
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import Condemn
from control_plane.service import Service
from protos import admin_pb2, admin_pb2_grpc
from scripts.topology import default_model_path
from tests.fakes.counting_service import (
    CountingCore,
    ask_to_stop,
    counting_service,
    frontend_pids,
    until,
)
from tests.fakes.dialling_worker import DiallingWorker

pytestmark = pytest.mark.anyio

FOR_EVER = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    path = default_model_path()
    assert path is not None, "the default model's package is not installed"
    return ModelFiles.load(path)


class PlayedStarts:
    """Programs that are started instead of frontends, as long as it is set."""

    def __init__(self) -> None:
        self.program: str | None = None
        self.played: list[Process] = []
        self._start = front_processes._start

    async def start(self, name: str, end: socket.socket) -> Process:
        if self.program is None:
            return await self._start(name, end)
        process = await create_subprocess_exec(
            sys.executable, "-c", self.program, pass_fds=[end.fileno()]
        )
        self.played.append(process)
        return process

    @property
    def played_ended(self) -> list[bool]:
        # By their status asyncio can err: whoever kills a process that has ended takes it away.
        return [process.returncode is not None for process in self.played]


@pytest.fixture
def starts(monkeypatch) -> PlayedStarts:
    played = PlayedStarts()
    monkeypatch.setattr(front_processes, "_start", played.start)
    return played


def service_of(model: ModelFiles, **settings) -> Service:
    ports = dict.fromkeys(("http_port", "grpc_port", "worker_port"), 0)
    config = ControlPlaneConfig(
        **{"model_path": str(model.path), "frontends": 2} | ports | settings
    )
    return Service(config, CountingCore(), model, term=1, clock=time.monotonic)


async def refusal(service: Service) -> str:
    with anyio.fail_after(60), pytest.raises(ConfigurationError) as refused:
        await service.run()
    return str(refused.value)


async def test_frontends_that_cannot_start_end_the_service_with_the_reason(model, starts):
    gone = service_of(model, model_path="gone")
    assert "no such file or directory; give a GGUF file" in await refusal(gone)
    starts.program = "raise SystemExit(3)"
    reason = await refusal(service_of(model))
    assert re.search("frontend. ended with status 3 before it served", reason)


async def test_frontends_that_never_take_requests_end_the_service_with_the_setting(model, starts):
    starts.program = FOR_EVER
    reason = await refusal(service_of(model, frontend_start_deadline_s=0.5))
    assert re.search("frontend. did not take requests within 0.5 s .*--frontend-start-dead", reason)
    assert starts.played_ended == [True, True]


async def test_a_later_one_that_never_takes_requests_is_started_again(model, starts):
    config = ControlPlaneConfig(str(model.path), frontends=1, http_port=0, grpc_port=0)
    core, sums = CountingCore(), RequestSums()
    metrics = Metrics(sums)
    frontends = FrontProcesses(
        config, model, print, lambda: core.snapshot(0.0), lambda: 1, metrics=metrics, sums=sums
    )
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            await frontends.start(tasks)
            # Only for the played one: ours may take long on a busy machine.
            frontends._config = replace(config, frontend_start_deadline_s=0.5)
            starts.program = FOR_EVER
            os.kill(frontend_pids(logs, "frontend0")[0], signal.SIGKILL)
            await until(lambda: any(starts.played_ended))
            frontends._config, starts.program = config, None
            await until(lambda: len(frontend_pids(logs, "frontend0")) == 2)
            await frontends.stop()
            tasks.cancel_scope.cancel()
    late = [line["pid"] for line in logs if line["event"] == "frontend.late"]
    assert late[0] == starts.played[0].pid


async def test_a_signal_while_frontends_start_ends_the_service(model, starts):
    starts.program = FOR_EVER
    service = service_of(model)
    with capture_logs() as logs, anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:

            async def stop_once_they_start() -> None:
                await until(lambda: len(starts.played) == 2)
                ask_to_stop()

            tasks.start_soon(stop_once_they_start)
            assert await service.run()
    assert starts.played_ended == [True, True]
    assert not [line for line in logs if line["log_level"] in ("warning", "error", "critical")]


@pytest.mark.parametrize("signals_count", [1, 2])
async def test_workers_are_told_to_leave_though_frontends_do_not_end(
    model, tmp_path, signals_count
):
    with capture_logs() as logs:
        async with counting_service(model, tmp_path, frontends=2, drain_deadline_s=0.1) as s:
            worker = DiallingWorker(s.ports["worker_port"])
            await worker.attach()
            for name in ("frontend0", "frontend1"):
                os.kill(frontend_pids(logs, name)[0], signal.SIGSTOP)
            for _ in range(signals_count):
                ask_to_stop()
                await anyio.sleep(0.5)
            with anyio.fail_after(60):
                message = await worker.call.read()
            assert message is not grpc.aio.EOF
            assert message.shutdown.reason
            await worker.close()
            assert await s.ends()


async def test_a_service_that_cannot_be_announced_ends_with_the_option(model, tmp_path):
    for path, why in (
        (tmp_path, "it is no regular file"),
        (tmp_path / "none" / "file", "No such file or directory"),
    ):
        service = service_of(model, frontends=0, announce_path=str(path))
        assert f"--announce {path} cannot be written: {why}; give a" in await refusal(service)


async def test_a_verdict_that_falls_while_nobody_can_watch_is_told_later(model, tmp_path):
    with capture_logs() as logs:
        async with counting_service(model, tmp_path, frontends=1) as s:
            os.kill(frontend_pids(logs, "frontend0")[0], signal.SIGKILL)
            await until(lambda: any(line["event"] == "frontend.lost" for line in logs))
            s.core.handle = lambda _event, _now: [Condemn("chip0", 7, 4711, "frozen")]
            worker = DiallingWorker(s.ports["worker_port"])
            await worker.attach()
            await worker.close()
            assert len(frontend_pids(logs, "frontend0")) == 1
            del s.core.handle
            await until(lambda: len(frontend_pids(logs, "frontend0")) == 2)
            watch = admin_pb2_grpc.AdminServiceStub(s.channel).WatchVerdicts(
                admin_pb2.WatchVerdictsRequest(), wait_for_ready=True
            )
            with anyio.fail_after(60):
                verdict = await watch.read()
            assert (verdict.worker_id, verdict.incarnation, verdict.pid) == ("chip0", 7, 4711)
            watch.cancel()
