"""A whole service in the test's process around a core that counts, and clients of both protocols.

A block ends when its service did, which is asked to stop if the test did not.
"""

import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from control_plane.config import ControlPlaneConfig
from control_plane.errors import RequestCancelled
from control_plane.intake.model_files import ModelFiles
from control_plane.request import Request
from control_plane.scheduling.messages import (
    Accepted,
    BlockCounts,
    CacheFlushed,
    Cancel,
    Effect,
    End,
    Event,
    Failed,
    FlushCache,
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
from control_plane.service import Service
from protos import inference_pb2, inference_pb2_grpc
from tests.fakes.dialling_worker import DiallingWorker

STEP_S = 0.02
FLUSHED_BLOCKS = 7
PATIENCE_S = 60.0


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
            case FlushCache():
                return [CacheFlushed(FLUSHED_BLOCKS)]
            case Tick():
                deltas = [self._delta(request_id) for request_id in self.live]
                return [Tokens(tuple(deltas)), WakeAt(now + STEP_S)] if deltas else []
        return []

    def _submit(self, request: Request, now: float) -> list[Effect]:
        self.live[request.request_id] = len(request.output_ids)
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
        with anyio.fail_after(PATIENCE_S):
            await self.over.wait()
        return self.outcomes[0]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a condition is all a test has
            await anyio.sleep(0.005)


@asynccontextmanager
async def counting_service(model: ModelFiles, folder: Path, **settings) -> AsyncIterator[Served]:
    """Serves from the start of the block, with one worker that came and left."""
    announce = folder / f"{uuid.uuid4()}.json"
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


def frontend_pids(logs: list[dict[str, object]], name: str) -> list[int]:
    """Processes of this frontend that took clients, in their order."""
    found = [line for line in logs if line["event"] == "frontend.listening"]
    return [line["pid"] for line in found if line["name"] == name]


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
