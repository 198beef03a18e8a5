"""Intake in processes of its own, around a core that counts: one service, two frontends.

Whom a connection reaches is the system's choice, so tests open many.
"""

import functools
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from control_plane.frontends import front_processes
from control_plane.intake.model_files import ModelFiles
from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from scripts.topology import default_model_path
from tests.fakes.counting_service import (
    FLUSHED_BLOCKS,
    Served,
    counting_service,
    frontend_pids,
    until,
)

pytestmark = pytest.mark.anyio

CONNECTIONS = 12
LONG = 250
"""Tokens of a stream that is still running when something happens."""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="module")
def model() -> ModelFiles:
    path = default_model_path()
    assert path is not None, "the default model's package is not installed"
    return ModelFiles.load(path)


@pytest.fixture
def serving(model, tmp_path):
    """Starts services with two frontends."""
    return functools.partial(counting_service, model, tmp_path, frontends=2)


@asynccontextmanager
async def channels(served: Served, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """So many gRPC connections."""
    address = f"127.0.0.1:{served.ports['grpc_port']}"
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=OWN_CONNECTION)
            )
            for _ in range(count)
        ]


def generate_request(max_tokens: int, **fields) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = inference_pb2.TokenIds(ids=[1, 2, 3])
    return inference_pb2.GenerateRequest(prompt_ids=ids, sampling=sampling, **fields)


class Stream:
    """A generation that goes on in the background; ids, and how it ended."""

    def __init__(self, channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest) -> None:
        self.ids: list[int] = []
        self.code: grpc.StatusCode | None = None
        self._call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)

    async def run(self) -> None:
        try:
            async for piece in self._call:
                assert not piece.token_ids or piece.first_index == len(self.ids)
                self.ids.extend(piece.token_ids)
            self.code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            self.code = error.code()


def streamed_text(response: httpx.Response) -> str:
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(each)["choices"][0]["text"] for each in events)


async def test_two_frontends_are_one_service(serving):
    """Streams, ids, cancels, stop strings, flushes, status, health and metrics."""
    with capture_logs() as logs:
        async with serving() as s, channels(s, CONNECTIONS) as connections:
            await http_and_grpc_say_the_same(s)
            await answers_come_on_every_connection(s, connections)
            await an_id_in_progress_is_refused_on_every_connection(s, connections)
            await calls_are_cancelled_on_any_connection(s, connections)
            await what_is_asked_of_the_service_is_answered_by_any(connections)
            series = await s.series()
            await until(lambda: not s.core.live)
    received = [value for name, value in series.items() if name[0] == "requests_received_total"]
    ended = [
        value
        for name, value in series.items()
        if name[0] in ("request_success_total", "request_failures_total")
    ]
    calls = 3 + 2 * CONNECTIONS + 1 + CONNECTIONS + CONNECTIONS
    assert sum(received) == sum(ended) == series["e2e_request_latency_seconds_count",] == calls
    assert series["requests_received_total", "http"] == 2 + CONNECTIONS
    assert series["request_failures_total", "CANCELLED"] == 1 + CONNECTIONS
    assert series["request_failures_total", "INVALID_REQUEST"] == CONNECTIONS
    assert series["num_requests_open",] == 0
    assert series["frontends",] == 2
    assert series["frontends_lost_total",] == 0
    assert not [line for line in logs if line["log_level"] in ("warning", "error", "critical")]


async def http_and_grpc_say_the_same(s: Served) -> None:
    body = {"model": "default", "prompt": [1, 2, 3], "max_tokens": 12, "ignore_eos": True}
    whole = (await s.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    body |= {"stream": True, "stop": stop}
    stopped = await s.http.post("/v1/completions", json=body)
    assert streamed_text(stopped) == whole[: whole.index(stop)]
    request = generate_request(12)
    request.sampling.stop.append(stop)
    pieces = [piece async for piece in s.grpc.Generate(request)]
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].usage.group == "g0"


async def answers_come_on_every_connection(s: Served, connections: list[grpc.aio.Channel]) -> None:
    streams = [Stream(channel, generate_request(20)) for channel in connections]
    statuses: list[int] = []

    async def ask_http() -> None:
        async with httpx.AsyncClient(base_url=s.http.base_url, timeout=60) as client:
            body = {"model": "default", "prompt": "x", "max_tokens": 5, "ignore_eos": True}
            statuses.append((await client.post("/v1/completions", json=body)).status_code)

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(stream.run)
            tasks.start_soon(ask_http)
    assert [stream.ids for stream in streams] == [list(range(100, 120))] * CONNECTIONS
    assert statuses == [200] * CONNECTIONS


async def an_id_in_progress_is_refused_on_every_connection(
    s: Served, connections: list[grpc.aio.Channel]
) -> None:
    first = Stream(connections[0], generate_request(1000, request_id="mine"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        await s.until_running(1)
        others = [Stream(each, generate_request(5, request_id="mine")) for each in connections]
        async with anyio.create_task_group() as inner:
            for other in others:
                inner.start_soon(other.run)
        assert {other.code for other in others} == {grpc.StatusCode.INVALID_ARGUMENT}
        stub = inference_pb2_grpc.InferenceServiceStub(connections[-1])
        assert (await stub.Cancel(inference_pb2.CancelRequest(request_id="mine"))).found
    assert first.code is grpc.StatusCode.CANCELLED
    assert first.ids == list(range(100, 100 + len(first.ids)))


async def calls_are_cancelled_on_any_connection(
    s: Served, connections: list[grpc.aio.Channel]
) -> None:
    streams = [
        Stream(channel, generate_request(1000, request_id=f"call {index}"))
        for index, channel in enumerate(connections)
    ]
    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(stream.run)
        await s.until_running(CONNECTIONS)
        for index, channel in enumerate(reversed(connections)):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for request_id, found in ((f"call {index}", True), ("nobody's", False)):
                cancel = inference_pb2.CancelRequest(request_id=request_id)
                assert (await stub.Cancel(cancel)).found == found
    assert {stream.code for stream in streams} == {grpc.StatusCode.CANCELLED}
    await s.until_running(0)


async def what_is_asked_of_the_service_is_answered_by_any(
    connections: list[grpc.aio.Channel],
) -> None:
    for channel in connections:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        flushed = await admin.FlushCache(admin_pb2.FlushCacheRequest())
        assert flushed.blocks_freed == FLUSHED_BLOCKS
        status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        assert [(group.id, group.blocks.free) for group in status.groups] == [("g0", 64)]
        assert (status.requests.intake, status.term) == (0, 1)
        health = health_pb2_grpc.HealthStub(channel)
        check = await health.Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_killed_frontend_costs_only_its_own_streams(serving):
    with capture_logs() as logs:
        async with serving() as s, channels(s, 2 * CONNECTIONS) as connections:
            streams = [Stream(channel, generate_request(LONG)) for channel in connections]
            async with anyio.create_task_group() as tasks:
                for stream in streams:
                    tasks.start_soon(stream.run)
                await s.until_running(len(streams))
                (pid,) = frontend_pids(logs, "frontend0")
                os.kill(pid, signal.SIGKILL)
                # Until its sockets are closed the system may give them connections.
                await until(lambda: any(line["event"] == "frontend.lost" for line in logs))
                # All it asked for is cancelled at once; its clients may hear one after the other.
                await until(lambda: len(s.core.live) < len(streams))
                assert s.core.live
                # Whoever comes now gets an answer all the same.
                assert (await s.complete(3)).status_code == 200
            codes = [stream.code for stream in streams]
            assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            for stream in streams:
                if stream.code is grpc.StatusCode.OK:
                    assert stream.ids == list(range(100, 100 + LONG))
            await until(lambda: len(frontend_pids(logs, "frontend0")) == 2)
            assert (await s.series())["frontends",] == 2
            admin = admin_pb2_grpc.AdminServiceStub(connections[codes.index(grpc.StatusCode.OK)])
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            assert [
                (each.id, each.pid, each.state, each.lost_pid, each.lost_status)
                for each in status.frontends
            ] == [
                ("frontend0", frontend_pids(logs, "frontend0")[1], "listening", pid, -9),
                ("frontend1", frontend_pids(logs, "frontend1")[0], "listening", 0, 0),
            ]
            # A client that lost its stream goes on with the tokens it has, wherever it lands.
            lost = streams[codes.index(grpc.StatusCode.UNAVAILABLE)]
            request = generate_request(len(lost.ids) + 5)
            request.resume_output_ids.add(ids=lost.ids)
            resumed = [id_ async for piece in s.grpc.Generate(request) for id_ in piece.token_ids]
            assert [*lost.ids, *resumed] == list(range(100, 105 + len(lost.ids)))
            series = await s.series()
            assert series["num_requests_running", "g0"] == series["num_requests_open",] == 0
            assert series["kv_blocks", "g0", "referenced"] == 0
            assert series["frontends_lost_total",] == 1
    (line,) = [line for line in logs if line["event"] == "frontend.lost"]
    assert (line["name"], line["status"]) == ("frontend0", -signal.SIGKILL)
    assert line["calls_cancelled"] == codes.count(grpc.StatusCode.UNAVAILABLE)


async def test_a_frozen_frontend_is_killed_and_replaced(serving, monkeypatch):
    monkeypatch.setattr(front_processes, "PING_INTERVAL_S", 1.0)
    with capture_logs() as logs:
        async with serving():
            (pid,) = frontend_pids(logs, "frontend1")
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: len(frontend_pids(logs, "frontend1")) == 2)
    assert pid in [line["pid"] for line in logs if line["event"] == "frontend.frozen"]
