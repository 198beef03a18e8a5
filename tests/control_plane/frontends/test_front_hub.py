"""Who hears what of several frontends: ids, tokens, ends, cancels, flushes, scrapes and losses."""

from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.errors import RequestCancelled
from control_plane.frontends import wire
from control_plane.frontends.front_hub import Frontend, FrontHub
from control_plane.frontends.request_sums import RequestSums
from control_plane.metrics import Metrics
from control_plane.request import Request, Sampling
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    Condemn,
    End,
    Event,
    Failed,
    FlushCache,
    PromptDelta,
    PromptScores,
    RequestFacts,
    ServingChanged,
    Submit,
    TokenDelta,
    Tokens,
)
from protos import frontend_pb2

FACTS = RequestFacts("g0", 3, 0, 0, 0.5)


class PlayedFrontend(Frontend):
    """A frontend whose process is the test: keeps what it was sent, and says what it is told to."""

    def __init__(self, name: str, take: Callable[[Frontend, bytes], None]) -> None:
        self.heard: list[frontend_pb2.ToFrontend] = []
        self.metrics = Metrics()
        self._take = take
        self._numbers = 0
        super().__init__(
            name, lambda data: self.heard.append(frontend_pb2.ToFrontend.FromString(data))
        )

    def say(self, **kinds) -> None:
        self._take(self, frontend_pb2.FromFrontend(**kinds).SerializeToString())

    def open(self, request_id: str) -> int:
        self._numbers += 1
        opened = frontend_pb2.CallOpened(request_id=request_id, number=self._numbers)
        self.say(call_opened=opened)
        return self._numbers

    def close(self, request_id: str) -> None:
        self.say(call_closed=frontend_pb2.CallClosed(request_id=request_id))

    def submit(self, request_id: str, call_id: str | None = None) -> int:
        self._numbers += 1
        message = wire.submit_message(request(request_id), self._numbers, call_id or request_id)
        self._take(self, message.SerializeToString())
        return self._numbers

    def begin(self, request_id: str) -> int:
        self.open(request_id)
        return self.submit(request_id)

    def ask(self, query_id: int, **kinds) -> None:
        self.say(query=frontend_pb2.Query(query_id=query_id, **kinds))

    def report(self) -> None:
        self.say(metrics=frontend_pb2.RequestMetrics(text=self.metrics.requests_text()))

    def of(self, kind: str) -> list:
        return [getattr(each, kind) for each in self.heard if each.HasField(kind)]


class Hubbed:
    """A hub with two frontends that listen, around a core that only remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        sums = RequestSums()
        self.metrics = Metrics(sums)
        self.hub = FrontHub(
            self.events.append,
            lambda calls_count: b"calls %d" % calls_count,
            self.metrics.expose,
            sums,
        )
        self.a, self.b = (PlayedFrontend(name, self.hub.take) for name in ("a", "b"))
        for each in (self.a, self.b):
            self.hub.attach(each)
            each.say(listening=frontend_pb2.Listening())

    def value(self, text: bytes, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
            if sample.name == f"polychip_{name}" and labels.items() <= sample.labels.items()
        )


@pytest.fixture
def hubbed() -> Hubbed:
    return Hubbed()


def request(request_id: str) -> Request:
    return Request(request_id, (1, 2, 3), Sampling(temperature=0.0, seed=1))


def tokens(*request_ids: str, first_index: int = 0) -> Tokens:
    return Tokens(tuple(TokenDelta(each, first_index, (5, 6), (), FACTS) for each in request_ids))


def test_each_frontend_hears_of_its_own_requests_in_one_message_a_step(hubbed) -> None:
    a, b, hub = hubbed.a, hubbed.b, hubbed.hub
    numbers = {each: a.begin(each) for each in ("a0", "a1")}
    numbers["b0"] = b.begin("b0")
    assert [event.request.request_id for event in hubbed.events] == ["a0", "a1", "b0"]
    hub.deliver(Accepted("b0", 9))
    hub.deliver(tokens("a0", "b0", "nobody's", "a1"))
    scores = PromptScores((-0.5,))
    hub.deliver(Tokens((), (PromptDelta("b0", 1, scores),)))
    assert not a.of("accepted")
    assert [(each.number, each.tokens_max) for each in b.of("accepted")] == [(numbers["b0"], 9)]
    (told,) = a.of("tokens")
    assert list(told.number) == [numbers["a0"], numbers["a1"]]
    told, scored = b.of("tokens")
    assert list(told.number) == [numbers["b0"]]
    assert [each.number for each in scored.prompt_scores] == [numbers["b0"]]


def test_facts_are_told_when_they_change(hubbed) -> None:
    hubbed.a.begin("x")
    for first_index in (0, 2):
        hubbed.hub.deliver(tokens("x", first_index=first_index))
    first, second = hubbed.a.of("tokens")
    assert (len(first.facts), len(second.facts)) == (1, 0)


def test_ends_and_cancels_reach_the_core_once(hubbed) -> None:
    a, hub = hubbed.a, hubbed.hub
    numbers = {each: a.begin(each) for each in ("ended", "cancelled", "failed")}
    hubbed.events.clear()
    a.say(end=frontend_pb2.EndRequest(request_id="ended", output_count=4))
    a.say(cancel=frontend_pb2.CancelRequest(request_id="cancelled", reason="why"))
    hub.deliver(Failed("failed", RequestCancelled("gone", retry_after_s=2.0)))
    for each in ("ended", "cancelled", "failed"):
        a.say(cancel=frontend_pb2.CancelRequest(request_id=each, reason="late"))
        hub.deliver(tokens(each))
    assert hubbed.events == [End("ended", 4), Cancel("cancelled", "why")]
    assert not a.of("tokens")
    (failed,) = a.of("failed")
    assert failed.number == numbers["failed"]
    assert (failed.failure.reason, failed.failure.retry_after_s) == ("CANCELLED", 2.0)


def test_an_id_in_progress_is_refused_at_another_frontend(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    a.open("x")
    number = b.open("x")
    (refused,) = b.of("call_refused")
    assert (refused.request_id, refused.number) == ("x", number)
    assert refused.failure.reason == "INVALID_REQUEST"
    assert "is running already" in refused.failure.message
    # It did not know yet: nothing it says of the id counts, before and after the other submits.
    b.submit("x/0", "x")
    a.submit("x/0", "x")
    b.say(end=frontend_pb2.EndRequest(request_id="x/0", output_count=1))
    b.say(cancel=frontend_pb2.CancelRequest(request_id="x/0", reason="refused"))
    b.close("x")
    assert [event.request.request_id for event in hubbed.events] == ["x/0"]
    assert hubbed.hub.calls_count == 1
    a.say(end=frontend_pb2.EndRequest(request_id="x/0", output_count=1))
    a.close("x")
    b.begin("x")
    assert len(b.of("call_refused")) == 1
    assert isinstance(hubbed.events[-1], Submit)


def test_ids_of_choices_are_refused_too(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    a.open("x")
    a.submit("x/0", "x")
    b.open("x/0")
    assert [each.request_id for each in b.of("call_refused")] == ["x/0"]
    b.open("y/0")
    a.open("y")
    number = a.submit("y/0", "y")
    (failed,) = a.of("failed")
    assert (failed.number, failed.failure.reason) == (number, "INVALID_REQUEST")
    assert len(hubbed.events) == 1


def test_a_call_can_be_cancelled_at_another_frontend(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    a.open("x")
    cancel = frontend_pb2.CancelCall(request_id="x", reason="asked to")
    for query_id in (1, 2, 3):
        b.ask(query_id, cancel_call=cancel)
    b.ask(4, cancel_call=frontend_pb2.CancelCall(request_id="y"))
    assert [(each.request_id, each.reason) for each in a.of("cancel_call")] == [
        ("x", "asked to")
    ] * 3
    assert {each.query_id: each.found for each in b.of("answer")} == {4: False}
    # Its owner alone knows whether it is over, though its client still reads.
    first, second, _ = (each.cancel_id for each in a.of("cancel_call"))
    a.say(call_cancelled=frontend_pb2.CallCancelled(cancel_id=second, found=False))
    a.say(call_cancelled=frontend_pb2.CallCancelled(cancel_id=first, found=True))
    # Its own it would have found itself.
    a.ask(5, cancel_call=cancel)
    assert [each.found for each in a.of("answer")] == [False]
    hubbed.hub.detach(a)
    assert {each.query_id for each in b.of("answer")} == {1, 2, 3, 4}
    assert [each.query_id for each in b.of("answer") if each.found] == [1]


def test_flushes_are_answered_in_order(hubbed) -> None:
    for each in (hubbed.a, hubbed.b, hubbed.a):
        each.say(flush_cache=frontend_pb2.FlushCache())
    assert hubbed.events == [FlushCache()] * 3
    for count in (1, 2, 3):
        hubbed.hub.deliver(CacheFlushed(count))
    assert [each.blocks_freed for each in hubbed.a.of("cache_flushed")] == [1, 3]
    assert [each.blocks_freed for each in hubbed.b.of("cache_flushed")] == [2]


def test_a_lost_frontends_requests_are_cancelled_and_the_others_go_on(hubbed) -> None:
    a, b, hub = hubbed.a, hubbed.b, hubbed.hub
    for index in range(2):
        a.begin(f"a{index}")
    a.open("being read")
    b.begin("b0")
    hubbed.events.clear()
    assert hub.detach(a) == 3
    assert [event.request_id for event in hubbed.events] == ["a0", "a1"]
    assert all(isinstance(event, Cancel) for event in hubbed.events)
    hub.deliver(Failed("a0", RequestCancelled("as asked")))
    hub.deliver(tokens("a1", "b0"))
    assert (len(a.of("tokens")), len(a.of("failed")), len(b.of("tokens"))) == (0, 0, 1)
    assert hub.calls_count == 1
    b.begin("a0")
    assert not b.of("call_refused")


def test_whoever_comes_later_knows_what_all_were_told(hubbed) -> None:
    hub = hubbed.hub
    hub.deliver(ServingChanged(("g0", "g1")))
    hub.publish_verdict(Condemn("chip0", 7, 42, "frozen"))
    hub.refuse_new("draining")
    late = PlayedFrontend("late", hub.take)
    hub.attach(late)
    for each in (hubbed.a, hubbed.b, late):
        assert list(each.of("serving_changed")[-1].group_ids) == ["g0", "g1"]
        assert [refusal.reason for refusal in each.of("refuse_new")] == ["draining"]
        assert [verdict.pid for verdict in each.of("condemned")] == [42]


def test_it_is_drained_when_no_call_is_left_and_none_can_get_in(hubbed) -> None:
    a, b, hub = hubbed.a, hubbed.b, hubbed.hub
    a.open("x")
    hub.refuse_new("draining")
    a.say(refuses_new=frontend_pb2.RefusesNew())
    a.close("x")
    assert not hub.drained
    b.open("y")  # it got in before the word did
    b.say(refuses_new=frontend_pb2.RefusesNew())
    assert not hub.drained
    b.close("y")
    assert hub.drained


def test_who_never_listened_is_not_waited_for(hubbed) -> None:
    loading = PlayedFrontend("c", hubbed.hub.take)
    hubbed.hub.attach(loading)
    hubbed.hub.refuse_new("draining")
    for each in (hubbed.a, hubbed.b):
        assert not hubbed.hub.drained
        each.say(refuses_new=frontend_pb2.RefusesNew())
    assert hubbed.hub.drained
    loading.say(listening=frontend_pb2.Listening())
    assert not hubbed.hub.drained, "it may let one in until it has read the word"


def test_status_counts_the_calls_of_all(hubbed) -> None:
    hubbed.a.open("x")
    hubbed.b.open("y")
    hubbed.b.ask(8, status=frontend_pb2.StatusQuery())
    (answer,) = hubbed.b.of("answer")
    assert (answer.query_id, answer.content) == (8, b"calls 2")


def test_a_scrape_waits_for_what_the_others_counted(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    a.metrics.request_received("http")
    b.metrics.request_received("http")
    b.metrics.request_received("grpc")
    b.metrics.request_finished("stop", 0.7)
    a.report()
    a.ask(1, metrics=frontend_pb2.MetricsQuery(fresh=True))
    assert not a.of("answer")
    assert len(b.of("report_metrics")) == 1
    b.report()
    (answer,) = a.of("answer")
    assert hubbed.value(answer.content, "requests_received_total") == 3
    assert hubbed.value(answer.content, "requests_received_total", protocol="http") == 2
    assert hubbed.value(answer.content, "request_success_total", finished_reason="stop") == 1
    assert hubbed.value(answer.content, "e2e_request_latency_seconds_count") == 1
    assert hubbed.value(answer.content, "e2e_request_latency_seconds_bucket", le="0.8") == 1
    b.metrics.request_received("grpc")
    b.report()
    assert len(a.of("answer")) == 1


def test_a_scrape_that_lost_patience_gets_what_is_known(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    a.metrics.request_received("http")
    a.report()
    a.ask(1, metrics=frontend_pb2.MetricsQuery(fresh=True))
    a.ask(2, metrics=frontend_pb2.MetricsQuery())
    b.report()
    (answer,) = a.of("answer")
    assert answer.query_id == 2
    assert hubbed.value(answer.content, "requests_received_total") == 1


def test_a_lost_frontend_no_longer_holds_up_a_scrape(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    a.ask(1, metrics=frontend_pb2.MetricsQuery(fresh=True))
    b.ask(1, metrics=frontend_pb2.MetricsQuery(fresh=True))
    hubbed.hub.detach(b)
    assert len(a.of("answer")) == 1
    a.report()
    assert not b.of("answer")


def test_what_a_lost_frontend_counted_stays(hubbed) -> None:
    a, b = hubbed.a, hubbed.b
    for _ in range(3):
        a.metrics.request_received("grpc")
    a.metrics.request_finished("length", 2.0)
    a.metrics.generation_tokens(40)
    a.report()
    hubbed.hub.detach(a)
    again = PlayedFrontend("a", hubbed.hub.take)
    hubbed.hub.attach(again)
    again.metrics.generation_tokens(2)
    again.report()
    b.report()
    text, _ = hubbed.metrics.expose()
    assert hubbed.value(text, "generation_tokens_total") == 42
    assert hubbed.value(text, "requests_received_total") == 3
    assert hubbed.value(text, "request_success_total", finished_reason="length") == 1
    # Their clients lost them.
    assert hubbed.value(text, "request_failures_total", reason="UNAVAILABLE") == 2
