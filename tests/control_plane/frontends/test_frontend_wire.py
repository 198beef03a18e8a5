"""Everything that passes between a frontend and the core comes out as it went in."""

from dataclasses import fields, replace

import pytest

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.errors import RequestError
from control_plane.frontends import wire
from control_plane.frontends.remote_core import RemoteCore
from control_plane.frontends.wire import Choice
from control_plane.request import Request, Sampling
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Condemn,
    Failed,
    PromptDelta,
    PromptScores,
    RequestFacts,
    ServingChanged,
    Submit,
    TokenDelta,
    Tokens,
    TopTokens,
)
from protos import frontend_pb2

PLAIN = Request("x", (), Sampling(temperature=1.0, seed=0))
FULL = Request(
    request_id="call/3",
    prompt_ids=(0, 1, 262_143),
    sampling=Sampling(
        temperature=0.7,
        seed=2**64 - 1,
        choice=3,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias=((4, -100.0), (9, 0.1)),
        suppressed_ids=(2, 5),
        min_tokens=7,
    ),
    max_tokens=0,
    output_ids=(8, 9),
    priority=-5,
    deadline=12345.678,
    model="mine",
    adapter=2,
    salt="ours \ud800",
    wants_logprobs=True,
    top_tokens=5,
    prompt_top_tokens=0,
    wants_logits=True,
    use_prefix_cache=False,
    target_group="g1",
)


class Front:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.effects: list[object] = []
        self.verdicts: list[Condemn] = []
        self.calls: list[tuple[object, ...]] = []

    def deliver(self, effect) -> None:
        self.effects.append(effect)

    def publish_verdict(self, condemn) -> None:
        self.verdicts.append(condemn)

    def cancel(self, request_id, reason) -> bool:
        self.calls.append(("cancel", request_id, reason))
        return True

    def refuse(self, request_id, error) -> None:
        self.calls.append(("refuse", request_id, type(error), str(error)))

    def refuse_new(self, reason) -> None:
        self.calls.append(("refuse_new", reason))


class SilentLink:
    backlog_bytes = 0

    def send(self, message: bytes) -> None:
        pass


@pytest.fixture
def front() -> Front:
    return Front()


@pytest.fixture
def core(front) -> RemoteCore:
    made = RemoteCore(SilentLink(), lambda: b"")
    made.front = front
    return made


@pytest.mark.parametrize("request_", [PLAIN, FULL], ids=["plain", "full"])
def test_requests(request_) -> None:
    message = wire.submit_message(request_, 17, "call")
    sent = frontend_pb2.FromFrontend.FromString(message.SerializeToString()).submit
    assert (sent.number, sent.call_id) == (17, "call")
    assert wire.submit_of(sent).request == request_


def test_the_full_request_leaves_nothing_at_its_default() -> None:
    for record, plain in ((FULL, PLAIN), (FULL.sampling, PLAIN.sampling)):
        for field in fields(record):
            assert getattr(record, field.name) != getattr(plain, field.name), field.name


ERRORS = [RequestError, *RequestError.__subclasses__()]
EFFECTS = [Accepted("x", 2**40), CacheFlushed(12), ServingChanged(("g0", "g1")), ServingChanged(())]


def test_effects(core, front) -> None:
    core.post(Submit(replace(PLAIN, request_id="x")))
    accepted, *others = EFFECTS
    core.take(through(wire.accepted_message(1, accepted)))
    for effect in others:
        core.take(through(wire.effect_message(effect)))
    assert front.effects == EFFECTS


def test_errors(core, front) -> None:
    errors = [kind("why", field="f", retry_after_s=0.5) for kind in ERRORS]
    errors.append(ERRORS[1]("why"))
    for number, error in enumerate(errors, 1):
        core.post(Submit(PLAIN))
        core.take(through(wire.failed_message(number, error)))
    assert all(isinstance(effect, Failed) for effect in front.effects)
    assert [as_values(effect.error) for effect in front.effects] == list(map(as_values, errors))


def as_values(error) -> tuple[object, ...]:
    return type(error), error.message, error.field, error.retry_after_s


def test_tokens() -> None:
    facts = RequestFacts("g0", 16, 1, 2, 0.25)
    tops = (TopTokens((3, 4), (-0.5, -1.5)), TopTokens((), ()))
    deltas = (
        TokenDelta("plain", 5, (7,), (), facts),
        TokenDelta("scored", 0, (8, 9), (-0.25, float("-inf")), facts, tops, b"\0\0\x80?"),
        TokenDelta("empty", 3, (), (), facts),
        TokenDelta("plain", 6, (10,), (), replace(facts, failovers=2)),
    )
    prompts = (
        PromptDelta("scored", 1, PromptScores((-2.0, -4.0), tops)),
        PromptDelta("scored", 3, PromptScores((-8.0,))),
    )
    ours, theirs = (
        {name: Choice(number, name) for number, name in enumerate(("plain", "scored", "empty"))}
        for _ in range(2)
    )
    sent = wire.tokens_message(
        [(ours[delta.request_id], delta) for delta in deltas],
        [(ours[delta.request_id], delta) for delta in prompts],
    )
    known = {choice.number: choice for choice in theirs.values()}
    taken = wire.tokens_of(through(sent).tokens, known)
    # The last facts of a step are those of all its rows.
    last = {"plain": deltas[3].facts}
    expected = (each._replace(facts=last.get(each.request_id, facts)) for each in deltas)
    assert taken == Tokens(tuple(expected), prompts)
    del known[1]
    assert [each.request_id for each in wire.tokens_of(through(sent).tokens, known).deltas] == [
        *("plain", "empty", "plain")
    ]


def test_verdicts_and_orders(core, front) -> None:
    condemn = Condemn("chip0", 2**63 + 1, 4321, "frozen")
    core.take(through(wire.condemned_message(condemn)))
    error = ERRORS[1]("taken")
    core.call_opened("x")
    for number in (7, 1):
        refused = frontend_pb2.CallRefused(
            request_id="x", number=number, failure=wire.failure_of(error)
        )
        core.take(frontend_pb2.ToFrontend(call_refused=refused))
    cancel = frontend_pb2.CancelCall(request_id="y", reason="asked to")
    core.take(frontend_pb2.ToFrontend(cancel_call=cancel))
    core.take(frontend_pb2.ToFrontend(refuse_new=frontend_pb2.RefuseNew(reason="draining")))
    assert front.verdicts == [condemn]
    assert front.calls == [
        ("refuse", "x", ERRORS[1], "taken"),
        ("cancel", "y", "asked to"),
        ("refuse_new", "draining"),
    ]


def test_settings() -> None:
    scheduling = SchedulingConfig(group_sizes=(2, 1), context_tokens=99, step_deadline_s=1.5)
    config = ControlPlaneConfig(
        model_path="m", frontends=3, api_keys=("sk-1", "sk-2"), scheduling=scheduling
    )
    start = frontend_pb2.ToFrontend.FromString(wire.start_message(config)).start
    assert wire.config_of(start) == config


def through(message: frontend_pb2.ToFrontend) -> frontend_pb2.ToFrontend:
    return frontend_pb2.ToFrontend.FromString(message.SerializeToString())
