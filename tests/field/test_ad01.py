"""AD01: the waiting queue has no bound; a burst starves the health probe, and the server is killed.

Here what finds the queue full is refused at once, with the time to come back; what was accepted
finishes, and health answers throughout.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2_grpc
from tests.field.answers import Answer, answer_of_body, answer_of_messages, strict_json
from tests.field.field_cluster import (
    CALL_DEADLINE_S,
    QUEUE_MAX,
    RUNNING_MAX,
    FieldCluster,
    check_equal,
)
from tests.field.processes import control_plane_pid, memory_bytes
from tests.field.scrape import scrape

pytestmark = [pytest.mark.end_to_end, pytest.mark.quiet]

REQUESTS = 1000
PROMPT, TOKENS = "the quick brown fox", 60
HEALTH_S_P99 = 0.5
REFUSED_WITHIN_S = "5.0"
"""A bucket of the service's own histogram: our own client is the slower one."""
GROWTH_BYTES_MAX = 32 << 20
HEALTH_WATCH = """
import http.client, json, sys, threading, time
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
taken = []
print("ready", flush=True)
while not over.wait(0.01):
    began = time.monotonic()
    connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    connection.close()
    taken.append((time.monotonic() - began, response.status))
print(json.dumps(taken))
"""


class HealthWatch:
    """A probe in a process of its own; seconds and status of each look."""

    def __init__(self) -> None:
        self.looks: list[tuple[float, int]] = []

    @contextmanager
    def running(self, field: FieldCluster) -> Iterator[None]:
        address = field.cluster.http.removeprefix("http://")
        command = [sys.executable, "-c", HEALTH_WATCH, address]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
            written, _ = process.communicate(timeout=CALL_DEADLINE_S)
            self.looks = [(seconds, status) for seconds, status in json.loads(written)]

    @property
    def p99_s(self) -> float:
        times = sorted(seconds for seconds, _ in self.looks)
        return times[min(len(times) - 1, int(len(times) * 0.99))]


class Burst:
    """Requests of all protocols at the same moment."""

    def __init__(self, field: FieldCluster) -> None:
        self.field = field
        self.accepted: list[Answer] = []
        self.refused: Counter[str] = Counter()

    def run(self, count: int) -> None:
        asyncio.run(self._run(count))

    async def _run(self, count: int) -> None:
        address = self.field.cluster.grpc
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=self.field.cluster.http,
                timeout=CALL_DEADLINE_S,
                limits=limits,
                trust_env=False,
            ) as client,
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await asyncio.gather(
                *(self._http(client) if i % 2 else self._grpc(stub) for i in range(count))
            )

    async def _http(self, client: httpx.AsyncClient) -> None:
        path, body = self.field.http_request(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        response = await client.post(path, json=body)
        document = strict_json(response.text)
        if response.status_code == 200:
            self.accepted.append(answer_of_body(document))
            return
        assert response.status_code == 429, response.text
        assert document["error"]["code"] == "QUEUE_FULL"
        assert float(response.headers["retry-after"]) > 0
        self.refused["http"] += 1

    async def _grpc(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        request = self.field.grpc_request(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        refusal: grpc.aio.AioRpcError | None = None
        messages = []
        try:
            messages = [each async for each in stub.Generate(request, timeout=CALL_DEADLINE_S)]
        except grpc.aio.AioRpcError as error:
            refusal = error
        if refusal is None:
            self.accepted.append(answer_of_messages(messages))
            return
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, refusal
        assert retry_delay_s(refusal) > 0
        self.refused["grpc"] += 1


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)
    assert status is not None
    hint = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(hint) for detail in status.details), "no RetryInfo"
    return float(hint.retry_delay.ToMilliseconds()) / 1000


def test_a_burst_is_refused_fast_and_health_answers(
    field: FieldCluster, counted: Callable[[int], int]
) -> None:
    expected = field.oracle(PROMPT, TOKENS)
    field.check_alive()
    pid, before = control_plane_pid(field), scrape(field)
    memory_before = memory_bytes(pid)
    count = counted(REQUESTS)
    watch, burst = HealthWatch(), Burst(field)
    with watch.running(field):
        burst.run(count)
    after = scrape(field)

    refused_count = burst.refused.total()
    assert len(burst.accepted) + refused_count == count
    assert len(burst.accepted) >= RUNNING_MAX + QUEUE_MAX
    assert min(burst.refused["http"], burst.refused["grpc"]) > 0
    for answer in burst.accepted:
        check_equal(answer, expected)

    after.check_reconciled()
    refused = after.total("request_failures", "QUEUE_FULL") - before.total(
        "request_failures", "QUEUE_FULL"
    )
    assert refused == refused_count
    within = ("e2e_request_latency_seconds_bucket", REFUSED_WITHIN_S)
    assert after.total(*within) - before.total(*within) >= refused_count
    assert {status for _, status in watch.looks} == {200}
    assert watch.p99_s < HEALTH_S_P99, sorted(watch.looks)[-10:]
    assert memory_bytes(pid) - memory_before < GROWTH_BYTES_MAX
    field.check_alive()
