"""The control plane's process around the real core and intake; workers are played by the test."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from protos import worker_pb2
from scripts.topology import default_model_path
from tests.fakes.dialling_worker import DiallingWorker

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
QUICK = ["--heartbeat-interval", "0.2", "--lease", "0.5", "--heartbeat-timeout", "1.0"]
QUICK += ["--formation-heartbeat-timeout", "1.0"]


class ControlPlane:
    """A running `python -m control_plane` and the ports it announced."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        announce = folder / "announce.json"
        self.log = folder / "log"
        model = default_model_path()
        assert model is not None, "the default model's package is not installed"
        command = [sys.executable, "-m", "control_plane", "--model", str(model)]
        command += ["--http-port=0", "--grpc-port=0", "--worker-port=0", f"--announce={announce}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *arguments], cwd=ROOT, stderr=log)
        deadline = time.monotonic() + 120
        while not announce.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.ports = json.loads(announce.read_text())
        self.url = f"http://127.0.0.1:{self.ports['http_port']}"

    def wait(self) -> int:
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def control_plane(tmp_path, request) -> Iterator[ControlPlane]:
    """With further options where a test gives some."""
    running = ControlPlane(tmp_path, *QUICK, *getattr(request, "param", ()))
    yield running
    running.close()


WITH_FRONTENDS = ("--frontends", "2")
with_frontends = pytest.mark.parametrize("control_plane", [WITH_FRONTENDS], indirect=True)
with_and_without_frontends = pytest.mark.parametrize(
    "control_plane", [(), WITH_FRONTENDS], ids=["alone", "frontends"], indirect=True
)


class ServingWorker(DiallingWorker):
    """Forms whatever group it is asked to, and draws 100, 101, ... by output index."""

    output_count = 0
    alive: asyncio.Future[None] | None = None

    def stay_alive(self, term: int) -> None:
        self.alive = asyncio.ensure_future(self._beat(term))

    async def _beat(self, term: int) -> None:
        with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
            while True:
                await self.heartbeat(term)
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        if self.alive is not None:
            self.alive.cancel()
        await super().close()

    async def form(self) -> worker_pb2.FormGroup:
        form = (await self.read()).form
        ready = worker_pb2.Ready(
            term=form.term,
            group_epoch=form.group_epoch,
            blocks=64,
            prefill_tokens_per_s=1000,
            decode_step_s=0.001,
            step_credit=2,
        )
        await self.send(ready=ready)
        return form

    async def compute(self, steps_count: int) -> list[worker_pb2.Step]:
        """Answers so many steps of one request."""
        return [await self._answer((await self.read()).step) for _ in range(steps_count)]

    async def compute_until_shutdown(self) -> str:
        """Answers whatever comes; returns why the worker should leave, and leaves."""
        while True:
            message = await self.read()
            if message.HasField("shutdown"):
                await self.send(goodbye=worker_pb2.Goodbye(reason="as told"))
                return message.shutdown.reason
            await self._answer(message.step)

    async def _answer(self, step: worker_pb2.Step) -> worker_pb2.Step:
        assert step.step_id, "a step was expected"
        for admission in step.admissions:
            self.output_count = len(admission.token_ids) - admission.output_start
        drawn = len(step.sampled_row)
        await self.send(
            result=worker_pb2.StepResult(
                term=step.term,
                group_epoch=step.group_epoch,
                step_id=step.step_id,
                token_count=[1] * drawn,
                token_ids=[100 + self.output_count] * drawn,
                times=worker_pb2.StepTimes(step_id=step.step_id, device_ns=1_000_000),
            )
        )
        self.output_count += drawn
        return step


async def complete(url: str, max_tokens: int) -> dict:
    body = {"model": "default", "prompt": [1, 2, 3, 4, 5], "max_tokens": max_tokens}
    body |= {"return_token_ids": True, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
async def start_worker(control_plane):
    """Starts workers of the control plane; closes them at the end."""
    workers: list[ServingWorker] = []

    async def start(incarnation: int, silent: bool = False) -> ServingWorker:
        worker = ServingWorker(control_plane.ports["worker_port"], incarnation=incarnation)
        workers.append(worker)
        welcome = await worker.attach()
        if not silent:
            worker.stay_alive(welcome.term)
        await worker.form()
        return worker

    yield start
    for worker in workers:
        await worker.close()


@with_and_without_frontends
async def test_a_request_survives_the_loss_of_its_worker(control_plane, start_worker):
    first = await start_worker(11)
    answer = asyncio.ensure_future(complete(control_plane.url, 6))
    steps = await first.compute(3)
    assert list(steps[0].admissions[0].token_ids) == [1, 2, 3, 4, 5]
    await first.close()
    second = await start_worker(12)
    replay = (await second.compute(1))[0].admissions[0]
    # What was drawn before is replayed as output, not drawn again.
    assert replay.output_start == 5
    assert list(replay.token_ids)[5:] == list(range(100, 95 + len(replay.token_ids)))
    await second.compute(6 - (len(replay.token_ids) - 5) - 1)
    body = await asyncio.wait_for(answer, 10)
    assert body["choices"][0]["token_ids"] == [100, 101, 102, 103, 104, 105]
    assert body["usage"]["polychip"]["failovers"] == 1


async def test_a_silent_worker_is_dropped(control_plane, start_worker):
    worker = await start_worker(11, silent=True)
    code, _ = await worker.status()
    assert code is grpc.StatusCode.ABORTED
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{control_plane.url}/health")).status_code == 503


async def test_a_control_plane_that_stood_still_keeps_its_workers(control_plane, start_worker):
    worker = await start_worker(11)
    answer = asyncio.ensure_future(complete(control_plane.url, 4))
    await worker.compute(1)
    control_plane.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5)
    control_plane.process.send_signal(signal.SIGCONT)
    await worker.compute(3)
    body = await asyncio.wait_for(answer, 10)
    assert body["usage"]["polychip"]["failovers"] == 0
    await asyncio.sleep(1.2)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{control_plane.url}/health")).status_code == 200
    assert "control_plane.stalled" in control_plane.log.read_text()


async def test_sigterm_lets_running_requests_finish(control_plane, start_worker):
    worker = await start_worker(11)
    answer = asyncio.ensure_future(complete(control_plane.url, 4))
    await worker.compute(1)
    control_plane.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    assert control_plane.process.poll() is None
    async with httpx.AsyncClient() as client:
        body = {"model": "default", "prompt": "x", "max_tokens": 1}
        refused = await client.post(f"{control_plane.url}/v1/completions", json=body)
    assert refused.status_code == 503
    reason = await worker.compute_until_shutdown()
    assert len((await asyncio.wait_for(answer, 10))["choices"][0]["token_ids"]) == 4
    assert reason
    assert await asyncio.to_thread(control_plane.wait) == 0


@with_and_without_frontends
async def test_a_second_signal_stops_at_once(control_plane, start_worker):
    worker = await start_worker(11)
    answer = asyncio.ensure_future(complete(control_plane.url, 4))
    await worker.compute(1)
    control_plane.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    began_at = time.monotonic()
    control_plane.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(control_plane.wait)
    assert time.monotonic() - began_at < 4
    await asyncio.wait([answer], timeout=5)
    assert answer.done()
    assert answer.exception() is not None


async def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(AssertionError, match=f"--http-port {port}: give others"):
            ControlPlane(tmp_path, "--http-port", port)


async def test_keys_are_asked_for_and_never_logged(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-first\nsk-second\n")
    running = await asyncio.to_thread(ControlPlane, tmp_path, "--api-key-file", str(keys))
    try:
        async with httpx.AsyncClient(base_url=running.url) as client:
            for key, status in (("sk-second", 200), ("sk-third", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await client.get("/v1/models", headers=headers)).status_code == status
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/metrics")).status_code == 200
        running.process.terminate()
        assert await asyncio.to_thread(running.wait) == 0
    finally:
        running.close()
    log = running.log.read_text()
    assert "sk-" not in log
    (line,) = [each for each in log.splitlines() if "service.settings" in each]
    assert json.loads(line)["api_keys"] == 2


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


async def test_a_launcher_that_is_killed_leaves_no_orphan(tmp_path):
    announce = tmp_path / "announce.json"
    command = [sys.executable, "-m", "control_plane", "--model", str(default_model_path())]
    command += ["--http-port=0", "--grpc-port=0", "--worker-port=0", f"--announce={announce}"]
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    with subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [sys.executable, "-c", launcher, *command, "--exit-with-parent"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    ) as parent:
        while not announce.exists():
            assert parent.poll() is None
            await asyncio.sleep(0.02)
        ports = json.loads(announce.read_text())
        parent.kill()
    deadline = time.monotonic() + 10
    while accepts_connections(ports["http_port"]):
        if time.monotonic() > deadline:
            os.kill(ports["pid"], signal.SIGKILL)
            raise AssertionError("the control plane outlived its parent")
        await asyncio.sleep(0.02)


@with_frontends
async def test_frontends_without_their_control_plane_say_so_and_end(control_plane, start_worker):
    worker = await start_worker(11)
    body = {"model": "default", "prompt": "x", "max_tokens": 100, "temperature": 0}
    async with httpx.AsyncClient(timeout=30, base_url=control_plane.url) as client:
        answer = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await worker.compute(1)
        control_plane.process.kill()
        response = await asyncio.wait_for(answer, 30)
    assert response.status_code == 503
    assert float(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "UNAVAILABLE"
    deadline = time.monotonic() + 30
    while any(
        accepts_connections(control_plane.ports[each]) for each in ("http_port", "grpc_port")
    ):
        assert time.monotonic() < deadline, "they outlived their control plane"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("options", [(), WITH_FRONTENDS], ids=["alone", "frontends"])
async def test_a_failing_core_ends_the_process_with_one_line(tmp_path, options):
    script = (
        "import sys, control_plane.scheduling.core as core\n"
        "from control_plane.scheduling.messages import Submit\n"
        "handle = core.SchedulingCore.handle\n"
        "def fail(self, event, now):\n"
        "    if isinstance(event, Submit): raise AssertionError('blocks are lost')\n"
        "    return handle(self, event, now)\n"
        "core.SchedulingCore.handle = fail\n"
        "import control_plane.__main__ as entry\n"
        "entry.main(sys.argv[1:])\n"
    )
    announce = tmp_path / "announce.json"
    command = [sys.executable, "-c", script, "--model", str(default_model_path())]
    command += ["--http-port=0", "--grpc-port=0", "--worker-port=0", f"--announce={announce}"]
    with subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        while not announce.exists():
            assert process.poll() is None
            await asyncio.sleep(0.02)
        ports = json.loads(announce.read_text())
        worker = ServingWorker(ports["worker_port"])
        worker.stay_alive((await worker.attach()).term)
        await worker.form()
        body = {"model": "default", "prompt": "x", "max_tokens": 1}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['http_port']}") as client:
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            answer = await client.post("/v1/completions", json=body, timeout=30)
        _, stderr = await asyncio.to_thread(process.communicate, None, 20)
    await worker.close()
    assert process.returncode == 1
    assert answer.status_code == 503
    (line,) = [line for line in stderr.splitlines() if "blocks are lost" in line]
    assert json.loads(line)["event"] == "core.failed"


async def test_the_control_plane_never_imports_torch():
    script = "import sys, control_plane.__main__; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert await process.wait() == 0
