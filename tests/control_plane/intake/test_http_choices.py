"""Several choices and prompts, log-probabilities and echo over HTTP, against a scripted core."""

import json
import math
import threading
from dataclasses import replace

import pytest

from control_plane.errors import WorkerFailure
from control_plane.intake.http_format import AnswerFormat
from control_plane.scheduling.messages import (
    Cancel,
    End,
    PromptDelta,
    PromptScores,
    Submit,
    Tokens,
    TopTokens,
)
from tests.control_plane.intake.fake_core import END, delta, failing, saying

pytestmark = pytest.mark.anyio

WORDS = ("red", "green", "blue")


def no_json(name):
    raise AssertionError(f"{name} is no JSON")


def strict(text):
    return json.loads(text, parse_constant=no_json)


def events(response):
    """The chunks of a stream that came to its end."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [strict(block.removeprefix("data: ")) for block in blocks[:-2]]


def texts_by_index(chunks):
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "something came after a finish reason"
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
            part = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[index] = texts.get(index, "") + part
    return texts, reasons


def by_choice(request):
    return saying(WORDS[request.sampling.choice])(request)


def by_prompt(request):
    return saying(bytes(request.prompt_ids) + bytes([48 + request.sampling.choice]))(request)


@pytest.mark.parametrize("chat", [False, True])
async def test_three_choices_whole_and_streamed(start, core, chat):
    core.script = by_choice
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    ask |= {"n": 3, "seed": 5, "max_tokens": 5}
    async with start() as s:
        whole = strict((await s.http.post(path, json=ask)).text)
        with_usage = ask | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await s.http.post(path, json=with_usage))
        bare = events(await s.http.post(path, json=ask | {"stream": True, "stream_options": {}}))
    said = [c["message"]["content"] if chat else c["text"] for c in whole["choices"]]
    assert said == ["red", "green", "blue"]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in whole["choices"]] == ["stop", "length", "stop"]
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 4 + 5 + 5
    assert whole["usage"]["prompt_tokens"] == len(core.last_request.prompt_ids)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert not any("usage" in chunk for chunk in bare)
    for each in (chunks, bare):
        assert texts_by_index(each) == (
            {0: "red", 1: "green", 2: "blue"},
            {0: "stop", 1: "length", 2: "stop"},
        )
    assert {request.sampling.seed for request in (e.request for e in core.of(Submit))} == {5}


@pytest.mark.parametrize("prompts", [["a", "b"], [[97], [98]]])
async def test_prompts_times_choices(start, core, prompts):
    core.script = by_prompt
    async with start() as s:
        ask = {"prompt": prompts, "n": 2, "return_token_ids": True}
        whole = strict((await s.http.post("/v1/completions", json=ask)).text)
        chunks = events(await s.http.post("/v1/completions", json=ask | {"stream": True}))
    assert [c["text"] for c in whole["choices"]] == ["a0", "a1", "b0", "b1"]
    assert [c.get("prompt_token_ids") for c in whole["choices"]] == [[97], None, [98], None]
    assert whole["usage"]["prompt_tokens"] == 2
    assert texts_by_index(chunks)[0] == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_more_choices_than_allowed(start, core):
    async with start(choices_max=3) as s:
        for ask in ({"prompt": "a", "n": 4}, {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a"] * 4}):
            r = await s.http.post("/v1/completions", json=ask)
            assert r.status_code == 400
            assert r.json()["error"]["param"] == ("n" if "n" in ask else "prompt")
        assert core.of(Submit) == []
        r = await s.http.post("/v1/completions", json={"prompt": ["a"] * 3})
    assert r.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_choice_ends_the_call_and_the_others(start, core, stream):
    def script(request):
        if request.sampling.choice == 1:
            return failing(WorkerFailure("chip lost"), after="abc")(request)
        return saying("x" * 1000)(request)

    core.script = script
    core.interval_s = 0.01
    async with start() as s:
        ask = {"prompt": "a", "n": 3, "stream": stream, "max_tokens": 200}
        r = await s.http.post("/v1/completions", json=ask)
        assert s.intake.running_count == 0
        assert len(core.of(Submit)) == 3
        assert {event.request_id[-2:] for event in core.of(Cancel)} == {"/0", "/2"}
    if stream:
        assert r.status_code == 200
        *_, last, end = r.text.split("\n\n")
        assert end == ""
        assert strict(last.removeprefix("data: "))["error"]["message"] == "chip lost"
        assert "[DONE]" not in r.text
    else:
        assert r.status_code == 500
        assert strict(r.text)["error"]["type"] == "server_error"


TOP = TopTokens((104, 0xE2, 72), (-0.5, -1.0, -math.inf))


def scoring(request):
    """Scores a prompt in two parts, then says "hé" with alternatives at each place."""
    count = len(request.prompt_ids)
    effects = []
    if request.prompt_top_tokens is not None and count > 1:
        for first, last in ((1, 2), (2, count)):
            many = last - first
            tops = (TopTokens((112, 113), (-0.1, -math.inf)),) * many
            scores = PromptScores((-1.0,) * many, tops if request.prompt_top_tokens else ())
            effects.append(Tokens((), (PromptDelta(request.request_id, first, scores),)))
    for index, token in enumerate([*"hé".encode(), END]):
        tops = (TOP,) if request.top_tokens else ()
        effects.append(delta(request, index, [token], tops=tops))
    return effects


async def test_alternatives_of_completions_stream_and_not(start, core):
    core.script = scoring
    ask = {"prompt": "pq", "logprobs": 3}
    async with start() as s:
        whole = strict((await s.http.post("/v1/completions", json=ask)).text)
        chunks = events(await s.http.post("/v1/completions", json=ask | {"stream": True}))
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "bytes:\\xe2": -1.0, "H": None}
    assert set(logprobs["top_logprobs"][1]) == {"h", "bytes:\\xe2", "H", "bytes:\\xc3"}
    for name, values in logprobs.items():
        assert [v for c in chunks for v in c["choices"][0]["logprobs"][name]] == values
        assert len(values) == 4


async def test_alternatives_of_conversations(start, core):
    core.script = scoring
    ask = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    async with start() as s:
        whole = strict((await s.http.post("/v1/chat/completions", json=ask)).text)
        chunks = events(await s.http.post("/v1/chat/completions", json=ask | {"stream": True}))
    content = whole["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [2, 2, 2, 2]
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [each for part in streamed if part for each in part["content"]] == content


@pytest.mark.parametrize("number", [0, 1])
async def test_echo_with_logprobs_stream_and_not(start, core, number):
    core.script = scoring
    ask = {"prompt": ["pqr", "z"], "echo": True, "logprobs": number}
    async with start() as s:
        whole = strict((await s.http.post("/v1/completions", json=ask)).text)
        chunks = events(await s.http.post("/v1/completions", json=ask | {"stream": True}))
    first, second = whole["choices"]
    assert (first["text"], second["text"]) == ("pqrhé", "zhé")
    assert first["logprobs"]["token_logprobs"][:3] == [None, -1.0, -1.0]
    assert second["logprobs"]["token_logprobs"][0] is None
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4, 5]
    if number:
        assert first["logprobs"]["top_logprobs"][:3] == [
            None,
            {"p": -0.1, "q": -1.0},
            {"p": -0.1, "r": -1.0},
        ]
    else:
        assert first["logprobs"]["top_logprobs"] is None
    for choice in (first, second):
        parts = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [v for part in parts for v in part["logprobs"][name]]
            assert joined == choice["logprobs"][name]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_echo_of_the_prompt_alone(start, core, stream, logprobs):
    core.script = scoring
    ask = {"prompt": "pqr", "echo": True, "max_tokens": 0, "logprobs": logprobs, "stream": stream}
    async with start() as s:
        r = await s.http.post("/v1/completions", json=ask)
        body = events(r)[-1] if stream else strict(r.text)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("pqr", "length")
    if logprobs is None:
        assert choice["logprobs"] is None
        assert core.of(Submit) == []
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
        assert core.of(End) == [End(core.last_request.request_id, 0)]
    if not stream:
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["prompt_tokens"] == 3


async def test_prompt_logprobs(start, core):
    core.script = scoring
    chat = {"messages": [{"role": "user", "content": "h"}], "prompt_logprobs": 2}
    async with start() as s:
        ask = {"prompt": "pqr", "prompt_logprobs": 1, "n": 2}
        completion = strict((await s.http.post("/v1/completions", json=ask)).text)
        conversation = strict((await s.http.post("/v1/chat/completions", json=chat)).text)
    first, second = completion["choices"]
    assert first["logprobs"] is second["logprobs"] is None
    assert "prompt_logprobs" not in second
    assert first["prompt_logprobs"] == [
        None,
        {
            "113": {"logprob": -1.0, "decoded_token": "q"},
            "112": {"logprob": -0.1, "decoded_token": "p", "rank": 1},
        },
        {
            "114": {"logprob": -1.0, "decoded_token": "r"},
            "112": {"logprob": -0.1, "decoded_token": "p", "rank": 1},
        },
    ]
    scores = conversation["prompt_logprobs"]
    assert len(scores) == conversation["usage"]["prompt_tokens"]
    assert scores[1]["113"] == {"logprob": None, "decoded_token": "q", "rank": 2}


async def test_echo_and_prompt_logprobs_want_different_numbers(start, core):
    core.script = scoring
    ask = {"prompt": "pqr", "echo": True, "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 1}
    async with start() as s:
        body = strict((await s.http.post("/v1/completions", json=ask)).text)
    (choice,) = body["choices"]
    assert set(choice["logprobs"]["top_logprobs"][1]) == {"p", "q"}
    assert [each and set(each) for each in choice["prompt_logprobs"]] == [None, {"113"}, {"114"}]


async def test_every_choice_of_an_echo_has_the_scores_of_its_prompt(start, core):
    core.script = scoring
    ask = {"prompt": ["pqr", "st"], "n": 3, "echo": True, "logprobs": 1, "max_tokens": 3}
    async with start() as s:
        whole = strict((await s.http.post("/v1/completions", json=ask)).text)
        chunks = events(await s.http.post("/v1/completions", json=ask | {"stream": True}))
    scored = [event.request.prompt_top_tokens for event in core.of(Submit)]
    assert scored == [1, None, None] * 4
    for index, choice in enumerate(whole["choices"]):
        prompt = ask["prompt"][index // 3]
        assert choice["text"] == prompt + "hé"
        assert choice["logprobs"]["tokens"][: len(prompt)] == list(prompt)
        assert (
            choice["logprobs"]["token_logprobs"][: len(prompt)] == [None, -1.0, -1.0][: len(prompt)]
        )
        parts = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][name]] == values


async def test_choices_that_only_echo_a_scored_prompt(start, core):
    core.script = scoring
    ask = {"prompt": "pqr", "n": 2, "echo": True, "logprobs": 0, "max_tokens": 0}
    async with start() as s:
        whole = strict((await s.http.post("/v1/completions", json=ask)).text)
        chunks = events(await s.http.post("/v1/completions", json=ask | {"stream": True}))
    assert len(core.of(Submit)) == 2  # one of each call
    for choices in (whole["choices"], [chunk["choices"][0] for chunk in chunks]):
        assert sorted(choice["index"] for choice in choices) == [0, 1]
        for choice in choices:
            assert (choice["text"], choice["finish_reason"]) == ("pqr", "length")
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more",
    [{"return_token_ids": True}, {"echo": True}, {"logprobs": 5}],
    ids=["ids", "text", "scores"],
)
async def test_large_answers_are_written_in_threads(
    start, core, tiny_model, monkeypatch, stream, more
):
    """Whatever it is that makes them large."""
    threads = set()

    def recording(self, *arguments):
        threads.add(threading.get_ident())
        return common(self, *arguments)

    common = AnswerFormat._common
    core.script = lambda request: [delta(request, 0, [*b"x" * 1500, END])]
    core.tokens_max = 10**6
    large = replace(tiny_model, context_tokens=10**6)
    ask = {"prompt": "p" * 40_000, "n": 3, "max_tokens": 2000, "stream": stream} | more
    async with start(large) as s:
        monkeypatch.setattr(AnswerFormat, "_common", recording)
        r = await s.http.post("/v1/completions", json=ask)
        choices = [c["choices"][0] for c in events(r)] if stream else strict(r.text)["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1, 2]
    for choice in choices:
        assert choice["text"] == ("p" * 40_000 if "echo" in more else "") + "x" * 1500
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("stream", [False, True])
async def test_thousands_of_log_probabilities(start, core, stream):
    core.script = scoring
    ask = {"prompt": "p" * 200, "echo": True, "logprobs": 20, "stream": stream, "max_tokens": 2}
    async with start() as s:
        r = await s.http.post("/v1/completions", json=ask)
        choices = [c["choices"][0] for c in events(r)] if stream else strict(r.text)["choices"]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 202
    assert "".join(choice["text"] for choice in choices).startswith("p" * 200 + "h")
    assert core.of(Cancel) == []


async def test_a_stop_string_and_its_null(start, core):
    core.script = saying("one two three")
    async with start() as s:
        for stop, text in ((" t", "one"), (["three", "wo"], "one t"), (None, "one two three")):
            for stream in (False, True):
                ask = {"prompt": "hi", "stop": stop, "stream": stream}
                r = await s.http.post("/v1/completions", json=ask)
                if stream:
                    assert texts_by_index(events(r)) == ({0: text}, {0: "stop"})
                else:
                    assert r.json()["choices"][0]["text"] == text
