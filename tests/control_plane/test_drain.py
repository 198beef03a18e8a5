"""A whole service in this process around a core that counts: signals, drain, what is measured."""

import json
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.errors import RequestCancelled
from control_plane.intake.model_files import ModelFiles
from control_plane.request import Request
from control_plane.scheduling.messages import (
    Accepted,
    BlockCounts,
    Cancel,
    Effect,
    End,
    Event,
    Failed,
    GroupSnapshot,
    RequestFacts,
    ServingChanged,
    Snapshot,
    Submit,
    Tick,
    TokenDelta,
    Tokens,
    WakeAt,
    WorkerAttached,
)
from control_plane.service import WORKERS_GRACE_S, Service
from protos import inference_pb2, inference_pb2_grpc
from scripts.topology import default_model_path
from tests.fakes.dialling_worker import DiallingWorker

pytestmark = pytest.mark.anyio

STEP_S = 0.02
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class CountingCore:
    """Gives every request one token a tick: 100, 101, ..."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case WorkerAttached():
                return [ServingChanged(("g0",))]
            case Submit(request=request):
                return self._submit(request, now)
            case End(request_id=request_id):
                self.live.pop(request_id, None)
            case Cancel(request_id=request_id, reason=reason):
                if self.live.pop(request_id, None) is not None:
                    return [Failed(request_id, RequestCancelled(reason))]
            case Tick():
                deltas = [self._delta(request_id) for request_id in self.live]
                return [Tokens(tuple(deltas)), WakeAt(now + STEP_S)] if deltas else []
        return []

    def _submit(self, request: Request, now: float) -> list[Effect]:
        self.live[request.request_id] = 0
        tokens_max = request.max_tokens or 1000
        return [Accepted(request.request_id, tokens_max), WakeAt(now + STEP_S)]

    def _delta(self, request_id: str) -> TokenDelta:
        index = self.live[request_id]
        self.live[request_id] = index + 1
        return TokenDelta(request_id, index, (100 + index,), (), RequestFacts("g0"))

    def snapshot(self, now: float) -> Snapshot:
        del now
        running = len(self.live)
        blocks = BlockCounts(64 - running, 0, running, 64)
        group = GroupSnapshot("g0", 1, (), "serving", running, 0, 0, blocks, 16, 0, 0)
        return Snapshot((), (group,), running, 0, running, 0, 0)


class Served:
    """A running service and clients of both protocols."""

    def __init__(
        self, core: CountingCore, announced: dict[str, int], over: anyio.Event, outcomes: list[bool]
    ) -> None:
        self.core, self.ports = core, announced
        self.over, self.outcomes = over, outcomes
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{announced['http_port']}", timeout=20
        )
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{announced['grpc_port']}")
        self.grpc = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def complete(self, max_tokens: int) -> httpx.Response:
        body = {"model": "default", "prompt": [1, 2, 3], "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return await self.http.post("/v1/completions", json=body)

    async def generate(self, max_tokens: int) -> list[int]:
        sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = inference_pb2.GenerateRequest(
            prompt_ids=inference_pb2.TokenIds(ids=[1, 2, 3]), sampling=sampling
        )
        return [id_ async for piece in self.grpc.Generate(request) for id_ in piece.token_ids]

    async def health(self) -> tuple[int, int]:
        """Of HTTP and of gRPC."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        check = await stub.Check(health_pb2.HealthCheckRequest())
        return (await self.http.get("/health")).status_code, check.status

    async def series(self) -> dict[tuple[str, ...], float]:
        """Values by name and labels, as a scrape shows them."""
        text = (await self.http.get("/metrics")).text
        return {
            (sample.name.removeprefix("polychip_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def until_running(self, count: int) -> None:
        await until(lambda: len(self.core.live) == count)

    async def ends(self) -> bool:
        """Whether the process would exit with 0, once it is over."""
        with anyio.fail_after(15):
            await self.over.wait()
        return self.outcomes[0]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(15):
        while not condition():  # noqa: ASYNC110 - a condition is all a test has
            await anyio.sleep(0.005)


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    path = default_model_path()
    assert path is not None, "the default model's package is not installed"
    return ModelFiles.load(path)


@pytest.fixture
def serving(model, tmp_path):
    """Starts services; a block ends when its service did, which is stopped if the test did not."""

    @asynccontextmanager
    async def serving(**settings) -> AsyncIterator[Served]:
        announce = tmp_path / f"{uuid.uuid4()}.json"
        ports = dict.fromkeys(("http_port", "grpc_port", "worker_port"), 0)
        config = ControlPlaneConfig(
            model_path=str(model.path), announce_path=str(announce), **ports, **settings
        )
        core = CountingCore()
        service = Service(config, core, model, term=1, clock=time.monotonic)
        over = anyio.Event()
        outcomes: list[bool] = []

        async def run() -> None:
            outcomes.append(await service.run())
            over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await until(announce.exists)
            served = Served(core, json.loads(announce.read_text()), over, outcomes)
            worker = DiallingWorker(served.ports["worker_port"])
            await worker.attach()
            await worker.close()
            yield served
            if not over.is_set():
                ask_to_stop()
            await served.ends()
            await served.http.aclose()
            await served.channel.close()

    return serving


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_running_requests_finish_while_new_ones_are_refused(serving):
    async with serving() as s, anyio.create_task_group() as tasks:
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


async def test_what_runs_beyond_the_deadline_ends_with_an_error(serving):
    async with serving(drain_deadline_s=0.3) as s, anyio.create_task_group() as tasks:
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
        assert 0.3 <= time.monotonic() - began < 5
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
