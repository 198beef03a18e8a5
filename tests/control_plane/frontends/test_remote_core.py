"""What an intake in a process of its own says to the core, and what it does when nobody answers."""

import asyncio

import pytest

from control_plane.errors import QueueFull, ServiceUnavailable
from control_plane.frontends import remote_core
from control_plane.frontends.remote_core import REQUESTS_BACKLOG_BYTES_MAX, RemoteCore
from control_plane.request import Request, Sampling
from control_plane.scheduling.messages import (
    Accepted,
    Cancel,
    End,
    Failed,
    FlushCache,
    RequestFacts,
    Submit,
    TokenDelta,
    Tokens,
)
from protos import admin_pb2, frontend_pb2

pytestmark = pytest.mark.anyio


class HeardLink:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.backlog_bytes = 0
        self.said: list[frontend_pb2.FromFrontend] = []

    def send(self, message: bytes) -> None:
        self.said.append(frontend_pb2.FromFrontend.FromString(message))

    def of(self, kind: str) -> list:
        return [getattr(each, kind) for each in self.said if each.HasField(kind)]


class Front:
    """Has calls of these ids in progress."""

    def __init__(self, *call_ids: str) -> None:
        self.effects: list[object] = []
        self.deliver = self.effects.append
        self._call_ids = {*call_ids}

    def cancel(self, request_id: str, _reason: str) -> bool:
        found = request_id in self._call_ids
        self._call_ids.discard(request_id)
        return found


@pytest.fixture
def link() -> HeardLink:
    return HeardLink()


@pytest.fixture
def core(link) -> RemoteCore:
    made = RemoteCore(link, lambda: b"counted")
    made.front = Front()
    return made


def submit(request_id: str) -> Submit:
    return Submit(Request(request_id, (1,), Sampling(temperature=0.0, seed=1)))


def tokens(*numbers: int) -> frontend_pb2.ToFrontend:
    count = len(numbers)
    columns = frontend_pb2.StepTokens(
        number=numbers, first_index=[0] * count, token_count=[1] * count, token_ids=range(count)
    )
    return frontend_pb2.ToFrontend(tokens=columns)


async def test_a_choice_is_told_with_its_call_and_a_number_of_its_own(core, link) -> None:
    for call_id in ("alone", "many/0", "many"):
        core.call_opened(call_id)
    for request_id in ("alone", "many/0", "many/1"):
        core.post(submit(request_id))
    assert [each.call_id for each in link.of("submit")] == ["alone", "many/0", "many"]
    assert [each.request_id for each in link.of("submit")] == ["alone", "many/0", "many/1"]
    assert len({each.number for each in link.of("submit")}) == 3


async def test_tokens_of_a_choice_that_is_over_are_dropped(core, link) -> None:
    for request_id in ("ended", "cancelled", "failed", "goes on"):
        core.post(submit(request_id))
    numbers = [each.number for each in link.of("submit")]
    core.front.effects.clear()
    core.post(End("ended", 3))
    core.post(Cancel("cancelled", "why"))
    failed = frontend_pb2.RequestFailed(
        number=numbers[2], failure=frontend_pb2.Failure(reason="UNAVAILABLE", message="why")
    )
    for _ in range(2):
        core.take(frontend_pb2.ToFrontend(failed=failed))
    accepted = frontend_pb2.RequestAccepted(number=numbers[0], tokens_max=5)
    core.take(frontend_pb2.ToFrontend(accepted=accepted))
    core.take(tokens(*numbers))
    over, told = core.front.effects
    assert (over.request_id, over.error.reason) == ("failed", "UNAVAILABLE")
    assert told == Tokens((TokenDelta("goes on", 0, (3,), (), RequestFacts()),))
    assert [(each.request_id, each.output_count) for each in link.of("end")] == [("ended", 3)]
    assert [each.reason for each in link.of("cancel")] == ["why"]


async def test_what_the_core_cannot_take_is_refused_but_not_what_ends_it(core, link) -> None:
    core.post(submit("before"))
    link.backlog_bytes = REQUESTS_BACKLOG_BYTES_MAX + 1
    core.post(submit("refused"))
    (failed,) = core.front.effects
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, QueueFull)
    assert (failed.request_id, failed.error.retry_after_s) == ("refused", 1.0)
    core.post(End("before", 0))
    core.post(FlushCache())
    assert [each.WhichOneof("kind") for each in link.said] == ["submit", "end", "flush_cache"]
    link.backlog_bytes = 0
    core.post(submit("again"))
    number = link.of("submit")[-1].number
    accepted = frontend_pb2.RequestAccepted(number=number, tokens_max=5)
    core.take(frontend_pb2.ToFrontend(accepted=accepted))
    assert core.front.effects[-1] == Accepted("again", 5)


async def test_questions_get_their_own_answers(core, link) -> None:
    asked = [
        asyncio.ensure_future(core.status(0)),
        asyncio.ensure_future(core.cancel_elsewhere("x", "why")),
    ]
    await asyncio.sleep(0)
    status, cancel = link.of("query")
    found = frontend_pb2.Answer(query_id=cancel.query_id, found=True)
    core.take(frontend_pb2.ToFrontend(answer=found))
    content = admin_pb2.GetStatusResponse(term=7).SerializeToString()
    answer = frontend_pb2.Answer(query_id=status.query_id, content=content)
    core.take(frontend_pb2.ToFrontend(answer=answer))
    assert (await asked[1], (await asked[0]).term) == (True, 7)


async def test_who_asks_elsewhere_hears_whether_a_call_was_ended(core, link) -> None:
    core.front = Front("x")
    for cancel_id in (4, 5):
        cancel = frontend_pb2.CancelCall(request_id="x", reason="why", cancel_id=cancel_id)
        core.take(frontend_pb2.ToFrontend(cancel_call=cancel))
    told = [(each.cancel_id, each.found) for each in link.of("call_cancelled")]
    assert told == [(4, True), (5, False)]


async def test_a_scrape_asks_again_for_what_is_known(core, link, monkeypatch) -> None:
    monkeypatch.setattr(remote_core, "REPORT_S", 0.01)
    asked = asyncio.ensure_future(core.metrics_text())
    while len(link.of("query")) < 2:  # noqa: ASYNC110 - a condition is all a test has
        await asyncio.sleep(0.005)
    assert [each.metrics.fresh for each in link.of("query")] == [True, False]
    # What was counted here goes before the question.
    assert link.said[0].metrics.text == b"counted"
    answer = frontend_pb2.Answer(query_id=link.of("query")[1].query_id, content=b"all")
    core.take(frontend_pb2.ToFrontend(answer=answer))
    assert await asked == (b"all", "")


async def test_nobody_waits_for_a_control_plane_that_is_gone(core, monkeypatch) -> None:
    asked = asyncio.ensure_future(core.status(0))
    await asyncio.sleep(0)
    core.close()
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        await asked
    monkeypatch.setattr(remote_core, "ANSWER_S", 0.01)
    with pytest.raises(ServiceUnavailable, match="does not answer") as caught:
        await core.cancel_elsewhere("x", "why")
    assert caught.value.retry_after_s
