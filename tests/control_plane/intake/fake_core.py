"""A scripted core in place of the scheduler, and an intake around it that listens on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import grpc
import httpx

from control_plane.config import ControlPlaneConfig
from control_plane.errors import RequestCancelled
from control_plane.intake.front import Intake
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.whole_service import LocalService
from control_plane.metrics import Metrics
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
    PromptDelta,
    PromptScores,
    RequestFacts,
    ServingChanged,
    Snapshot,
    Submit,
    TokenDelta,
    Tokens,
    TopTokens,
    WorkerSnapshot,
)

START, END, OTHER_END = 256, 257, 258
CONTEXT_TOKENS = 256
FACTS = RequestFacts(group_id="g1", cached_tokens=3, failovers=1, retractions=2)


def bytes_to_letters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def likeliest(token_id: int, count: int) -> TopTokens:
    ids = tuple((token_id + i) % 256 for i in range(count))
    return TopTokens(ids, tuple(-float(i) for i in range(count)))


def delta(request: Request, first_index: int, token_ids: Iterable[int], **kwargs) -> Tokens:
    ids = tuple(token_ids)
    logprobs = tuple(-float(i) for i in range(len(ids))) if request.wants_logprobs else ()
    kwargs.setdefault("logprobs", logprobs)
    if request.top_tokens:
        kwargs.setdefault("tops", tuple(likeliest(each, request.top_tokens) for each in ids))
    return Tokens((TokenDelta(request.request_id, first_index, ids, facts=FACTS, **kwargs),))


def scores(request: Request, first_index: int = 1, count: int | None = None) -> Tokens:
    """Log-probabilities of prompt tokens: minus a hundredth of the id; all of them, or `count`."""
    ids = request.prompt_ids[first_index:][:count]
    tops_count = request.prompt_top_tokens or 0
    tops = tuple(likeliest(each, tops_count) for each in ids) if tops_count else ()
    scored = PromptScores(tuple(-each / 100 for each in ids), tops)
    return Tokens((), (PromptDelta(request.request_id, first_index, scored),))


def saying(text: str | bytes, *, then: Iterable[int] = (END,)) -> Callable[[Request], list[Effect]]:
    """A script: the prompt's scores if asked for, the bytes of the text, one a token, the ids."""
    raw = text.encode() if isinstance(text, str) else text

    def script(request: Request) -> list[Effect]:
        ids = [*raw, *then][len(request.output_ids) :]
        first = len(request.output_ids)
        scored = [scores(request)] if request.prompt_top_tokens is not None else []
        return scored + [delta(request, first + i, [token]) for i, token in enumerate(ids)]

    return script


def failing(error, *, after: str = "") -> Callable[[Request], list[Effect]]:
    def script(request: Request) -> list[Effect]:
        return [*saying(after, then=())(request), Failed(request.request_id, error)]

    return script


@dataclass
class FakeCore:
    """Answers Submit with the script's effects, one per turn of the loop, until Cancel or End."""

    script: Callable[[Request], list[Effect]] = field(default_factory=lambda: saying("hello"))
    tokens_max: int = 1000
    interval_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    deliver: Callable[[Effect], None] = lambda _: None
    live: set[str] = field(default_factory=set)

    def post(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Submit(request=request):
                self.live.add(request.request_id)
                self.deliver(Accepted(request.request_id, self.tokens_max))
                self._next(request, list(self.script(request)))
            case End(request_id=request_id):
                self.live.discard(request_id)
            case Cancel(request_id=request_id, reason=reason):
                if request_id in self.live:
                    self.live.discard(request_id)
                    self.deliver(Failed(request_id, RequestCancelled(reason)))
            case FlushCache():
                self.deliver(CacheFlushed(41))

    def _next(self, request: Request, effects: list[Effect]) -> None:
        if not effects or request.request_id not in self.live:
            return

        def go() -> None:
            if request.request_id in self.live:
                self.deliver(effects.pop(0))
                self._next(request, effects)

        asyncio.get_running_loop().call_later(self.interval_s, go)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def last_request(self) -> Request:
        return self.of(Submit)[-1].request

    def snapshot(self) -> Snapshot:
        worker = WorkerSnapshot("chip0", 4, 5, "serving", "cores 0-1", "cpu", "g0", 0.25, 6)
        broken = WorkerSnapshot("chip1", 0, 9, "unavailable", "", "cpu", "g0", 1.0, reason="burnt")
        group = GroupSnapshot(
            "g0", 3, ("chip0",), "serving", 1, 2, 3, BlockCounts(1, 2, 3, 6), 16, 9, 2
        )
        return Snapshot((worker, broken), (group,), 7, 2, 1, 99, 6)


@dataclass
class Running:
    core: FakeCore
    intake: Intake
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    http_port: int
    grpc_port: int
    metrics: Metrics


@asynccontextmanager
async def running(model: ModelFiles, core: FakeCore, **settings) -> AsyncIterator[Running]:
    """An Intake that listens on loopback, serving, with a client for each protocol."""
    config = ControlPlaneConfig(
        model_path=str(model.path), model_name="tiny", http_port=0, grpc_port=0, **settings
    )
    metrics = Metrics()
    service = LocalService(core.snapshot, lambda: 12, metrics.expose)
    intake = Intake(config, model, core.post, service, lambda: 1000.0, metrics=metrics)
    core.deliver = intake.deliver
    async with anyio.create_task_group() as tasks:
        ports = await intake.start(tasks)
        intake.deliver(ServingChanged(("g0",)))
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http_port}", timeout=10) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}") as channel,
        ):
            yield Running(core, intake, http, channel, ports.http_port, ports.grpc_port, metrics)
        await intake.stop()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(15):
        while not condition():  # noqa: ASYNC110 - a condition is all a test has
            await anyio.sleep(0.005)
