"""gRPC over loopback against a scripted core: generation, health, errors, administration."""

import threading
from contextlib import suppress
from dataclasses import replace

import anyio
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.errors import (
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestCancelled,
    ServiceUnavailable,
    WorkerFailure,
)
from control_plane.intake import wire
from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.front import Intake
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.whole_service import LocalService
from control_plane.metrics import Metrics
from control_plane.request import Sampling
from control_plane.scheduling.messages import (
    Cancel,
    End,
    PromptDelta,
    PromptScores,
    ServingChanged,
    Submit,
    Tokens,
    TopTokens,
)
from protos import inference_pb2, inference_pb2_grpc
from tests.control_plane.intake.fake_core import END, delta, failing, saying, until

pytestmark = pytest.mark.anyio

Generate = inference_pb2.GenerateRequest


async def status_of(call):
    """How a call ends; its messages are read first, since a status does not pass unread ones."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


def inference(s):
    return inference_pb2_grpc.InferenceServiceStub(s.channel)


async def answer(s, **fields):
    return [piece async for piece in inference(s).Generate(Generate(**fields))]


async def refusal(s, **fields):
    """The status a request ends with, and its rich details by type."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(s, **fields)
    return details_of(caught.value)


def details_of(error):
    details = {}
    for packed in rpc_status.from_call(error).details:
        for kind in ("ErrorInfo", "BadRequest", "RetryInfo"):
            message = getattr(error_details_pb2, kind)()
            if packed.Unpack(message):
                details[kind] = message
    return error.code().name, error.details(), details


async def test_generate_streams_and_describes_itself(start, core):
    core.script = saying("né 👍")
    async with start() as s:
        pieces = await answer(
            s,
            request_id="mine",
            prompt="hi",
            sampling={"temperature": 0.5, "seed": 2**64 - 1, "logprobs": True},
        )
    assert (pieces[0].request_id, pieces[0].prompt_ids) == ("mine", [104, 105])
    assert not any(piece.request_id or piece.prompt_ids for piece in pieces[1:])
    assert "".join(piece.text for piece in pieces) == "né 👍"
    assert not any("\ufffd" in piece.text for piece in pieces)
    ids = [each for piece in pieces for each in piece.token_ids]
    assert ids == [*"né 👍".encode(), END]
    indexes = [p.first_index + i for p in pieces for i in range(len(p.token_ids))]
    assert indexes == list(range(len(ids)))
    assert sum(len(piece.logprobs) for piece in pieces) == len(ids)
    assert [p.finish_reason for p in pieces if p.finish_reason] == [
        inference_pb2.FINISH_REASON_STOP
    ]
    usage = pieces[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, len(ids), 3)
    assert (usage.group, usage.failovers, usage.retractions) == ("g1", 1, 2)
    assert usage.seed == pieces[0].seed == 2**64 - 1
    assert not any(piece.HasField("seed") for piece in pieces[1:])
    assert core.last_request.deadline is None


async def test_chat_ids_and_text_agree(start):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with start() as s:
        by_chat = await answer(s, chat=chat)
        ids = list(by_chat[0].prompt_ids)
        by_text = await answer(s, prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        by_ids = await answer(s, prompt_ids={"ids": ids})
    assert ids == [256, *b"user\nhi", 257, 10, 256, *b"assistant\n"]
    assert list(by_text[0].prompt_ids) == ids == list(by_ids[0].prompt_ids)


async def test_resuming_sends_nothing_again(start, core):
    core.script = saying("a👍b")
    held = [*b"a", *"👍".encode()[:2]]
    async with start() as s:
        pieces = await answer(s, prompt="hi", resume_output_ids=[{"ids": held}])
        complete = await answer(s, prompt="hi", resume_output_ids=[{"ids": [*b"a", END]}])
    assert "".join(piece.text for piece in pieces) == "👍b"
    assert pieces[0].first_index == 3
    assert pieces[-1].usage.completion_tokens == 7
    assert core.of(Submit)[0].request.output_ids == tuple(held)
    assert core.of(End) == [End(core.of(Submit)[0].request.request_id, 7)]
    assert [(p.text, list(p.token_ids), p.finish_reason) for p in complete] == [("", [], 1)]
    assert len(core.of(Submit)) == 1


async def test_every_field_reaches_the_core(start, core):
    from_client = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": 3,
        "min_tokens": 2,
    }
    others = {"stop": ["zz"], "stop_token_ids": [9], "ignore_eos": True, "max_tokens": 5}
    wants = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 3}
    sampling = from_client | others | wants | {"logit_bias": {200: -4.0, 100: 8.0}}
    core.script = lambda _: []
    config = SchedulingConfig(policy="priority")
    async with start(scheduling=config) as s:
        call = inference(s).Generate(
            Generate(prompt="hi", sampling=sampling, priority=-3, cache_salt="mine")
        )
        await until(lambda: core.of(Submit) != [])
        call.cancel()
        await until(lambda: s.intake.running_count == 0)
    request = core.last_request
    assert {name: getattr(request.sampling, name) for name in from_client} == from_client
    assert request.sampling.logit_bias == ((100, 8.0), (200, -4.0))
    assert 9 in request.sampling.suppressed_ids
    assert (request.max_tokens, request.priority, request.salt) == (5, -3, "mine")
    assert (request.wants_logprobs, request.top_tokens, request.prompt_top_tokens) == (True, 2, 3)
    assert not request.use_prefix_cache


async def test_what_was_not_sent_is_the_default(start, core):
    async with start() as s:
        first = (await answer(s, prompt="hi"))[0]
    request = core.last_request
    assert request.sampling == Sampling(temperature=1.0, seed=first.seed)
    assert (request.max_tokens, request.priority, request.salt) == (None, 0, "")
    assert not request.wants_logprobs
    assert request.prompt_top_tokens is None


async def test_filters_that_are_off_are_accepted(start, core):
    async with start() as s:
        for top_k in (0, -1, 300, 10**9):
            await answer(s, prompt="hi", sampling={"top_k": top_k})
            assert core.last_request.sampling.top_k in (0, 300, 10**9)
        await answer(s, prompt="hi", sampling={"temperature": 1e-12, "top_p": 0.0})
        assert core.last_request.sampling.temperature == 0


async def test_a_stop_string_is_not_in_the_answer(start, core):
    core.script = saying("one two three")
    async with start() as s:
        pieces = await answer(s, prompt="hi", sampling={"stop": ["two", " three"]})
    assert "".join(piece.text for piece in pieces) == "one "
    assert pieces[-1].finish_reason == inference_pb2.FINISH_REASON_STOP


TEXTS = ("first", "2nd", "the third")


def by_choice(request):
    return saying(TEXTS[request.sampling.choice])(request)


def joined(pieces, choice):
    """Text, token ids and finish reasons of a choice; checks that no index is missing."""
    own = [piece for piece in pieces if piece.choice == choice]
    ids = [each for piece in own for each in piece.token_ids]
    indexes = [p.first_index + i for p in own for i in range(len(p.token_ids))]
    assert indexes == list(range(indexes[0], indexes[0] + len(ids))) if ids else True
    return "".join(p.text for p in own), ids, [p.finish_reason for p in own if p.finish_reason]


async def test_choices_come_under_their_index(start, core):
    core.script = by_choice
    async with start() as s:
        pieces = await answer(s, request_id="mine", prompt="hi", sampling={"n": 3})
    for choice, text in enumerate(TEXTS):
        assert joined(pieces, choice) == (text, [*text.encode(), END], [1])
    assert [piece.HasField("usage") for piece in pieces].count(True) == 1
    usage = pieces[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, len("".join(TEXTS)) + 3)
    assert pieces[0].request_id == "mine"
    requests = [submit.request for submit in core.of(Submit)]
    assert [request.sampling.choice for request in requests] == [0, 1, 2]
    assert {request.sampling.seed for request in requests} == {pieces[0].seed}


async def test_every_choice_is_resumed(start, core):
    core.script = by_choice
    held = ["fi", "", "the third"]
    ids = [[*b"fi"], [], [*b"the third", END]]
    async with start() as s:
        pieces = await answer(
            s,
            prompt="hi",
            sampling={"n": 3, "seed": 8},
            resume_output_ids=[{"ids": each} for each in ids],
        )
        code, _, details = await refusal(s, prompt="hi", resume_output_ids=[{"ids": [1]}] * 2)
    for choice, text in enumerate(TEXTS):
        got_text, got_ids, reasons = joined(pieces, choice)
        assert held[choice] + got_text == text
        assert [*ids[choice], *got_ids] == [*text.encode(), END]
        assert reasons == [1]
    assert pieces[-1].usage.completion_tokens == len("".join(TEXTS)) + 3
    assert {submit.request.sampling.choice for submit in core.of(Submit)} == {0, 1}
    assert code == "INVALID_ARGUMENT"
    assert details["BadRequest"].field_violations[0].field == "resume_output_ids"


def tops_of(place, count):
    return TopTokens(tuple(range(count)), (-float(place), *(float("-inf"),) * (count - 1)))


async def test_likeliest_tokens_and_scores_of_the_prompt(start, core):
    def script(request):
        scores = [
            PromptScores((-float(place),), (tops_of(place, 2),))
            for place in range(1, len(request.prompt_ids))
        ]
        return [
            *(
                Tokens((), (PromptDelta(request.request_id, place + 1, each),))
                for place, each in enumerate(scores)
            ),
            delta(request, 0, [END], tops=(tops_of(7, 3),)),
        ]

    core.script = script
    wants = {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2}
    async with start() as s:
        pieces = await answer(s, prompt="hey", sampling=wants)
        core.script = lambda request: script(request)[:-1]
        only_scores = await answer(
            s, prompt="hey", sampling={"max_tokens": 0, "prompt_logprobs": 2}
        )
    for found in (pieces, only_scores):
        parts = [piece.prompt_logprobs for piece in found if piece.HasField("prompt_logprobs")]
        assert parts[0].first_index == 1
        assert [each for part in parts for each in part.logprobs] == [-1.0, -2.0]
        tops = [each for part in parts for each in part.top_tokens]
        assert [list(top.ids) for top in tops] == [[0, 1]] * 2
        assert [list(top.logprobs) for top in tops] == [
            [-1.0, float("-inf")],
            [-2.0, float("-inf")],
        ]
    (top,) = (top for piece in pieces for top in piece.top_tokens)
    assert (list(top.ids), top.logprobs[0]) == ([0, 1, 2], -7.0)
    assert [piece.finish_reason for piece in only_scores if piece.finish_reason] == [2]
    assert only_scores[-1].usage.completion_tokens == 0


async def test_no_message_is_larger_than_the_limit(start, core, tiny_model):
    limit = 10_000
    prompt_ids = [33 + i % 80 for i in range(4000)]

    def script(request):
        places = range(1, len(request.prompt_ids))
        scores = PromptScores(
            tuple(-float(place) for place in places), tuple(tops_of(place, 20) for place in places)
        )
        return [
            Tokens((), (PromptDelta(request.request_id, 1, scores),)),
            delta(request, 0, [65] * 500, tops=tuple(tops_of(1, 20) for _ in range(500))),
        ]

    core.script = script
    large = replace(tiny_model, context_tokens=8192)
    wants = {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20, "max_tokens": 500}
    async with start(large, client_message_bytes_max=limit) as s:
        pieces = await answer(s, prompt_ids={"ids": prompt_ids}, sampling=wants)
    assert max(piece.ByteSize() for piece in pieces) <= limit
    assert pieces[0].request_id
    assert pieces[0].HasField("seed")
    assert [each for piece in pieces for each in piece.prompt_ids] == prompt_ids
    scores = [piece.prompt_logprobs for piece in pieces if piece.HasField("prompt_logprobs")]
    places = [part.first_index + i for part in scores for i in range(len(part.logprobs))]
    assert places == list(range(1, 4000))
    assert [-each for part in scores for each in part.logprobs] == places
    assert sum(len(part.top_tokens) for part in scores) == len(places)
    assert joined(pieces, 0) == ("A" * 500, [65] * 500, [2])
    assert sum(len(piece.top_tokens) for piece in pieces) == 500


async def test_an_answer_may_be_resumed_behind_any_of_its_messages(start, core, tiny_model):
    """A reader that fell behind gets several messages at once, and may lose the later ones."""
    said = "one \u00e9 two \U0001f44d three STOP four " * 25
    raw = said.encode()
    stop = {"stop": ["STOP x"]}

    def script(request):
        held = len(request.output_ids)
        return [delta(request, held, [*raw[held:], END])]

    core.script = script
    large = replace(tiny_model, context_tokens=8192)
    async with start(large, client_message_bytes_max=4000) as s:
        pieces = await answer(s, prompt="hi", sampling=stop)
        assert len(pieces) > 5
        assert max(piece.ByteSize() for piece in pieces) <= 4000
        for read in range(len(pieces)):
            held = [each for piece in pieces[:read] for each in piece.token_ids]
            rest = await answer(s, prompt="hi", sampling=stop, resume_output_ids=[{"ids": held}])
            text = "".join(piece.text for piece in [*pieces[:read], *rest])
            assert text == said, read


async def test_long_texts_of_few_tokens_are_divided_too():
    texts = ("x" * 300, "y" * 300, "", "\u00e9" * 200, "z")
    piece = AnswerPiece(0, 4, tuple(range(5)), "".join(texts), texts)
    messages = wire.generate_responses(piece, None, 4000)
    assert [list(message.token_ids) for message in messages] == [[0], [1], [2, 3, 4]]
    assert [message.first_index for message in messages] == [4, 5, 6]
    assert [message.text for message in messages] == [*texts[:2], "".join(texts[2:])]


async def test_a_call_that_is_refused_at_once_is_no_cancelled_one(start):
    async with start() as s:
        await refusal(s, prompt_ids={"ids": [5] * 5000})
        text = s.metrics.expose()[0].decode()
    assert 'polychip_request_failures_total{reason="INVALID_REQUEST"} 1.0' in text
    assert 'polychip_request_failures_total{reason="CANCELLED"} 0.0' in text


async def test_a_message_over_the_limit_is_refused_and_the_next_is_served(start):
    async with start(client_message_bytes_max=1 << 20) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(s, prompt="x" * (5 << 20))
        assert (await answer(s, prompt="hi"))[-1].finish_reason == 1
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def held_tokenizer(monkeypatch):
    """Tokenizing waits, in its thread, until the event is set."""
    released = threading.Event()
    encode = Tokenizer.encode

    def slow(self, text, **options):
        assert released.wait(15)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    yield released
    released.set()


async def test_cancelling_while_the_prompt_is_tokenized(start, core, held_tokenizer):
    async with start() as s:
        named = inference(s).Generate(Generate(prompt="hi", request_id="mine"))
        await until(lambda: s.intake.running_count == 1)
        found = await inference(s).Cancel(inference_pb2.CancelRequest(request_id="mine"))
        assert await status_of(named) == grpc.StatusCode.CANCELLED
        gone = inference(s).Generate(Generate(prompt="hi"))
        await until(lambda: s.intake.running_count == 1)
        gone.cancel()
        await until(lambda: s.intake.running_count == 0)
        held_tokenizer.set()
        assert (await answer(s, prompt="hi", request_id="mine"))[-1].finish_reason == 1
    assert found.found
    assert len(core.of(Submit)) == 1


async def test_a_deadline_ends_tokenizing(start, core, held_tokenizer):
    async with start() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference(s).Generate(Generate(prompt="hi"), timeout=0.2):
                pass
        await until(lambda: s.intake.running_count == 0)
        held_tokenizer.set()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert core.of(Submit) == []


async def test_every_error_has_its_status_and_details_as_over_http(start, core):
    errors = [
        InvalidRequest("x: bad", field="x"),
        ModelNotFound("model: no", field="model"),
        QueueFull("full", retry_after_s=1.5),
        ServiceUnavailable("none", retry_after_s=2),
        RequestCancelled("stopped"),
        DeadlineExceeded("late"),
        WorkerFailure("broken"),
    ]
    async with start() as s:
        for error in errors:
            core.script = failing(error)
            code, message, details = await refusal(s, prompt="hi")
            http = await s.http.post("/v1/completions", json={"prompt": "hi"})
            assert (code, http.status_code) == (error.grpc_status, error.http_status)
            described = http.json()["error"]
            assert message == described["message"] == error.message
            assert details["ErrorInfo"].reason == described["code"] == error.reason
            fields = (
                [v.field for v in details["BadRequest"].field_violations]
                if ("BadRequest" in details)
                else [None]
            )
            assert fields == [described["param"]] == [error.field]
            if error.retry_after_s is None:
                assert "RetryInfo" not in details
                assert "retry-after" not in http.headers
            else:
                delay = details["RetryInfo"].retry_delay.ToMilliseconds() / 1000
                assert delay == error.retry_after_s <= float(http.headers["retry-after"])


BAD_INPUT: list = [
    # what both say, as (fields of the message, HTTP body); then fields of SamplingParams
    ({"prompt": ""}, {"prompt": ""}),
    ({}, {}),
    ({"prompt_ids": {"ids": []}}, {"prompt": []}),
    ({"prompt_ids": {"ids": [5, 300]}}, {"prompt": [5, 300]}),
    ({"prompt_ids": {"ids": [5] * 256}}, {"prompt": [5] * 256}),
    ({"prompt_ids": {"ids": [5] * 5000}}, {"prompt": [5] * 5000}),
    ({"prompt": "x" * 300}, {"prompt": "x" * 300}),
    ({"prompt": "x", "model": "y"}, {"prompt": "x", "model": "y"}),
    ({"prompt": "x", "cache_salt": "s" * 257}, {"prompt": "x", "cache_salt": "s" * 257}),
    ({"prompt": "x", "priority": 1}, {"prompt": "x", "priority": 1}),
    *(
        ({"prompt": "x", "sampling": fields}, {"prompt": "x"} | fields)
        for fields in (
            {"temperature": -1.0},
            {"temperature": 101.0},
            {"max_tokens": 0},
            {"max_tokens": 256},
            {"stop_token_ids": [300]},
            {"stop_token_ids": [1] * 65},
            {"top_k": -2},
            {"top_p": -0.5},
            {"top_p": 1.5},
            {"min_p": 2.0},
            {"presence_penalty": 2.5},
            {"frequency_penalty": -2.5},
            {"repetition_penalty": 0.0},
            {"repetition_penalty": 101.0},
            {"logit_bias": {300: 1.0}},
            {"logit_bias": {5: 101.0}},
            {"stop": [""]},
            {"stop": ["a"] * 17},
            {"stop": ["a" * 257]},
            {"min_tokens": 5, "max_tokens": 4},
            {"n": 0},
            {"n": 129},
            {"prompt_logprobs": 21},
        )
    ),
]


@pytest.mark.parametrize("sent", BAD_INPUT, ids=lambda sent: str(sent[1])[:60])
async def test_both_protocols_say_the_same_of_bad_input(start, core, sent):
    grpc_fields, http_body = sent
    async with start() as s:
        code, message, details = await refusal(s, **grpc_fields)
        http = await s.http.post("/v1/completions", json=http_body)
        described = http.json()["error"]
        assert (code, http.status_code) in (("INVALID_ARGUMENT", 400), ("NOT_FOUND", 404)), message
        assert details["BadRequest"].field_violations[0].field == described["param"]
        if grpc_fields:
            assert message == described["message"]
    assert core.of(Submit) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
    ],
)
async def test_what_is_no_number_is_refused_by_name(start, core, field, value):
    sampling = {field: {5: value} if field == "logit_bias" else value}
    async with start() as s:
        code, message, details = await refusal(s, prompt="hi", sampling=sampling)
        assert core.of(Submit) == []
        assert (await answer(s, prompt="hi"))[-1].finish_reason == 1
    assert code == "INVALID_ARGUMENT"
    assert field in message
    assert details["BadRequest"].field_violations[0].field == field


async def test_lists_no_request_may_have_are_refused_at_once(start, core):
    many = 1_000_000
    long_ids = {"ids": [5] * many}
    sent = {
        "prompt": {"prompt_ids": long_ids},
        "messages": {"chat": {"messages": [{}] * 100_000}},
        "resume_output_ids": {"prompt": "x", "resume_output_ids": [long_ids]},
        "stop_token_ids": {"prompt": "x", "sampling": {"stop_token_ids": [5] * many}},
        "stop": {"prompt": "x", "sampling": {"stop": ["a"] * 100_000}},
    }
    async with start() as s:
        for field, fields in sent.items():
            code, message, details = await refusal(s, **fields)
            assert code == "INVALID_ARGUMENT", message
            assert details["BadRequest"].field_violations[0].field == field
        assert (await answer(s, prompt="hi"))[-1].finish_reason == 1
    assert len(core.of(Submit)) == 1


async def test_cancelling_a_call_or_by_name_reaches_the_core(start, core):
    core.interval_s = 0.01
    core.script = saying("x" * 200)
    async with start() as s:
        call = inference(s).Generate(Generate(prompt="hi"))
        await call.read()
        call.cancel()
        await until(lambda: len(core.of(Cancel)) == 1)
        await until(lambda: s.intake.running_count == 0)

        named = inference(s).Generate(Generate(prompt="hi", request_id="mine"))
        await named.read()
        found = await inference(s).Cancel(inference_pb2.CancelRequest(request_id="mine"))
        unknown = await inference(s).Cancel(inference_pb2.CancelRequest(request_id="other"))
        assert await status_of(named) == grpc.StatusCode.CANCELLED
    assert (found.found, unknown.found) == (True, False)
    assert core.of(End) == []
    assert len(core.of(Cancel)) == 2


async def test_a_message_that_cannot_be_read_ends_only_its_own_call(start, core):
    async with start() as s:
        method = s.channel.unary_stream("/polychip.v1.InferenceService/Generate")
        for raw in (b"\xff\xff\xff", b"\x1a\x02\xff\xfe"):
            call = method(raw)
            assert await call.code() != grpc.StatusCode.OK
        assert core.of(Submit) == []
        assert (await answer(s, prompt="hi"))[-1].finish_reason == 1


async def test_an_id_in_use_is_refused(start, core):
    core.script = lambda _: []
    async with start() as s:
        call = inference(s).Generate(Generate(prompt="hi", request_id="mine"))
        await until(lambda: core.of(Submit) != [])
        code, message, _ = await refusal(s, prompt="hi", request_id="mine")
        call.cancel()
        await until(lambda: s.intake.running_count == 0)
    assert (code, "request_id" in message) == ("INVALID_ARGUMENT", True)
    assert len(core.of(Submit)) == 1


async def test_a_deadline_travels_with_the_request_and_ends_it(start, core):
    core.script = lambda _: []
    async with start() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference(s).Generate(Generate(prompt="hi"), timeout=0.3):
                pass
        await until(lambda: core.of(Cancel) != [])
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1000 < core.last_request.deadline <= 1000.3


async def test_a_failure_in_mid_stream_is_the_status_after_the_pieces(start, core):
    core.script = failing(WorkerFailure("chip lost"), after="abc")
    async with start() as s:
        pieces = []

        async def read() -> None:
            async for piece in inference(s).Generate(Generate(prompt="hi")):
                pieces.append(piece)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
    assert "".join(piece.text for piece in pieces) == "abc"
    assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_a_reader_that_stalls_is_cancelled(start, core, tiny_model):
    # Five bytes a token on the wire: the buffers of both sides are full after some millions.
    many = 50_000
    core.script = lambda request: [delta(request, i * many, [255] * many) for i in range(100)]
    core.tokens_max = 10**9
    endless = replace(tiny_model, context_tokens=10**9)
    async with start(endless, stream_buffer_stall_s=0.3) as s:
        call = inference(s).Generate(Generate(prompt="hi"))
        await call.read()
        await until(lambda: core.of(Cancel) != [])
        await until(lambda: s.intake.running_count == 0)
        call.cancel()


async def test_health_follows_the_serving_groups_and_draining(start):
    async with start() as s:
        stub = health_pb2_grpc.HealthStub(s.channel)

        async def states():
            names = ("", "polychip.v1.InferenceService")
            asked = [
                await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names
            ]
            assert asked[0].status == asked[1].status
            return asked[0].status

        async def becomes(state):
            with anyio.fail_after(2):
                while await states() != state:  # noqa: ASYNC110 - a client can only ask
                    await anyio.sleep(0.01)

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        s.intake.deliver(ServingChanged(()))
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        s.intake.deliver(ServingChanged(("g1",)))
        await becomes(health_pb2.HealthCheckResponse.SERVING)
        s.intake.refuse_new("draining")
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_model_info_and_reflection(start):
    async with start(debug_api=True) as s:
        info = await inference(s).GetModelInfo(inference_pb2.GetModelInfoRequest())
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        names = [
            service.name
            async for response in stub.ServerReflectionInfo(iter([asked]))
            for service in response.list_services_response.service
        ]
    assert list(info.names) == ["tiny", "default"]
    assert (info.context_tokens, info.vocabulary_size) == (256, 259)
    assert list(info.end_token_ids) == [257, 258]
    assert info.has_chat_template
    assert "polychip.v1.InferenceService" in names
    assert "polychip.v1.AdminService" in names


async def test_a_port_in_use_is_refused_by_name(start, core, tiny_model):
    async with start() as s:
        for setting, port in (("http_port", s.http_port), ("grpc_port", s.grpc_port)):
            config = ControlPlaneConfig(
                model_path="x", **({"http_port": 0, "grpc_port": 0} | {setting: port})
            )
            metrics = Metrics()
            service = LocalService(core.snapshot, lambda: 0, metrics.expose)
            second = Intake(config, tiny_model, core.post, service, lambda: 0.0, metrics=metrics)
            async with anyio.create_task_group() as tasks:
                with pytest.raises(ConfigurationError, match=setting.replace("_", " ")):
                    await second.start(tasks)
                await second.stop()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_stream", "polychip.v1.InferenceService/Generate"),
        ("unary_unary", "polychip.v1.InferenceService/Cancel"),
        ("unary_unary", "polychip.v1.AdminService/GetStatus"),
        ("unary_stream", "grpc.health.v1.Health/Watch"),
        ("stream_stream", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_bytes_that_are_no_message_are_the_clients_fault(start, caplog, kind, method):
    async with start() as s:
        sent = iter([b"\xff\xff"]) if kind == "stream_stream" else b"\xff\xff"
        call = getattr(s.channel, kind)(f"/{method}")(sent)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "2 bytes are no message" in await call.details()
        assert (await answer(s, prompt="hi"))[-1].finish_reason
    assert not [record for record in caplog.records if record.exc_info]
