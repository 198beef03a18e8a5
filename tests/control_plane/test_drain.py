"""A whole service in this process around a core that counts: signals, drain, what is measured."""

import functools
import socket
import time

import anyio
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from structlog.testing import capture_logs

from control_plane.config import SchedulingConfig
from control_plane.intake.model_files import ModelFiles
from control_plane.service import WORKERS_GRACE_S
from scripts.topology import default_model_path
from tests.fakes.counting_service import Served, ask_to_stop, counting_service
from tests.fakes.dialling_worker import DiallingWorker

pytestmark = pytest.mark.anyio

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    path = default_model_path()
    assert path is not None, "the default model's package is not installed"
    return ModelFiles.load(path)


@pytest.fixture
def serving(model, tmp_path):
    """Starts services; a block ends when its service did, which is stopped if the test did not."""
    return functools.partial(counting_service, model, tmp_path)


@pytest.mark.parametrize("frontends", [0, 2])
async def test_running_requests_finish_while_new_ones_are_refused(serving, frontends):
    async with serving(frontends=frontends) as s, anyio.create_task_group() as tasks:
        answers: dict[str, object] = {}

        async def ask(protocol: str) -> None:
            ask_one = s.complete if protocol == "http" else s.generate
            answers[protocol] = await ask_one(40)

        assert await s.health() == (200, SERVING)
        tasks.start_soon(ask, "http")
        tasks.start_soon(ask, "grpc")
        await s.until_running(2)
        ask_to_stop()
        await until_draining(s)
        assert await s.health() == (503, NOT_SERVING)
        refused = await s.complete(1)
        assert refused.status_code == 503
        assert float(refused.headers["retry-after"]) > 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.generate(1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_delay_s(caught.value) > 0
        # Both still run: they were not what the refusals waited for.
        assert len(s.core.live) == 2
        assert await s.ends()
    assert answers["http"].json()["choices"][0]["token_ids"] == list(range(100, 140))
    assert answers["grpc"] == list(range(100, 140))
    for port in ("http_port", "grpc_port", "worker_port"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", s.ports[port]), timeout=1)


@pytest.mark.parametrize("frontends", [0, 2])
async def test_what_runs_beyond_the_deadline_ends_with_an_error(serving, frontends):
    async with (
        serving(drain_deadline_s=0.3, frontends=frontends) as s,
        anyio.create_task_group() as tasks,
    ):
        outcomes: list[object] = []

        async def ask_http() -> None:
            outcomes.append((await s.complete(1000)).status_code)

        async def ask_grpc() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.generate(1000)
            outcomes.append(caught.value.code())

        tasks.start_soon(ask_http)
        tasks.start_soon(ask_grpc)
        await s.until_running(2)
        began = time.monotonic()
        ask_to_stop()
        assert await s.ends()
        assert 0.3 <= time.monotonic() - began < 15
    assert len(outcomes) == 2
    assert set(outcomes) == {503, grpc.StatusCode.UNAVAILABLE}
    assert not s.core.live


async def test_a_second_signal_does_not_wait(serving):
    async with serving(drain_deadline_s=60.0) as s, anyio.create_task_group() as tasks:
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await s.complete(1000)).status_code)

        tasks.start_soon(ask)
        await s.until_running(1)
        ask_to_stop()
        await until_draining(s)
        began = time.monotonic()
        ask_to_stop()
        assert await s.ends()
        assert time.monotonic() - began < 5
    assert statuses == [503]


async def test_a_service_at_rest_stops_at_once(serving):
    async with serving(drain_deadline_s=60.0) as s:
        began = time.monotonic()
        ask_to_stop()
        assert await s.ends()
        assert time.monotonic() - began < 5


async def test_a_signal_while_it_stops_hurries_too(serving):
    async with serving() as s:
        # It waits for this worker to leave, and that one never does.
        worker = DiallingWorker(s.ports["worker_port"], "chip1")
        await worker.attach()
        ask_to_stop()
        while (await worker.read()).WhichOneof("kind") != "shutdown":
            pass
        began = time.monotonic()
        ask_to_stop()
        assert await s.ends()
        assert time.monotonic() - began < WORKERS_GRACE_S - 1
        await worker.close()


async def test_gauges_fall_with_the_last_client_and_counters_add_up(serving):
    async with serving() as s:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(s.complete, 1000)
            await s.until_running(8)
            series = await s.series()
            assert series["num_requests_running", "g0"] == 8
            assert series["num_requests_open",] == 8
            assert series["kv_blocks", "g0", "referenced"] == 8
            tasks.cancel_scope.cancel()
        await s.until_running(0)
        assert (await s.complete(3)).status_code == 200
        assert await s.generate(5) == list(range(100, 105))
        assert (await s.complete(-1)).status_code == 400
        series = await s.series()
    assert series["num_requests_running", "g0"] == series["num_requests_open",] == 0
    assert series["kv_blocks", "g0", "referenced"] == 0
    assert series["request_failures_total", "CANCELLED"] == 8
    assert series["request_failures_total", "INVALID_REQUEST"] == 1
    assert series["request_success_total", "length"] == 2
    received = [value for name, value in series.items() if name[0] == "requests_received_total"]
    assert sum(received) == 11
    assert series["e2e_request_latency_seconds_count",] == 11
    assert series["scheduler_stage_seconds_count", "submit"] == 10
    assert series["scheduler_stage_seconds_sum", "deliver"] > 0


async def test_a_context_beyond_the_models_is_said(serving, model):
    asked = model.context_tokens + 1
    with capture_logs() as lines:
        async with serving(scheduling=SchedulingConfig(context_tokens=asked)):
            pass
        async with serving(scheduling=SchedulingConfig(context_tokens=asked - 1)):
            pass
    cut = [line for line in lines if line["event"] == "service.context_cut"]
    assert [(line["asked_tokens"], line["model_tokens"]) for line in cut] == [(asked, asked - 1)]


async def until_draining(s: Served) -> None:
    with anyio.fail_after(5):
        while (await s.http.get("/health")).status_code == 200:  # noqa: ASYNC110 - another's state
            await anyio.sleep(0.005)


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    for packed in rpc_status.from_call(error).details:
        hint = error_details_pb2.RetryInfo()
        if packed.Unpack(hint):
            return hint.retry_delay.ToMilliseconds() / 1000
    raise AssertionError("no RetryInfo")
