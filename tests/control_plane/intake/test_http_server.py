"""HTTP over a real port against a scripted core."""

import json
import socket
from dataclasses import replace
from itertools import product

import anyio
import grpc
import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    ServiceUnavailable,
    WorkerFailure,
)
from control_plane.intake.http_server import HttpServer
from control_plane.request import FinishReason
from control_plane.scheduling.messages import Cancel, End, ServingChanged, Submit
from protos import inference_pb2, inference_pb2_grpc
from tests.control_plane.intake.fake_core import END, delta, failing, saying, until

pytestmark = pytest.mark.anyio


def events(text: str) -> list:
    """The data of an event stream; every event must be one line of data."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [b[6:] if b == "data: [DONE]" else json.loads(b[6:]) for b in blocks[:-1]]


async def test_completion(start, core):
    async with start() as s:
        r = await s.http.post(
            "/v1/completions",
            json={"prompt": "hi", "temperature": 0, "seed": 5, "return_token_ids": True},
        )
    assert r.status_code == 200
    body = r.json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
    assert choice["prompt_token_ids"] == list(b"hi")
    assert choice["token_ids"] == [*b"hello", END]
    assert choice["logprobs"] is None
    assert body["object"] == "text_completion"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 3},
        "polychip": {"group": "g1", "failovers": 1, "retractions": 2, "seed": 5},
    }
    assert core.last_request.sampling.temperature == 0
    assert core.of(End) == [End(core.last_request.request_id, 6)]
    assert core.of(Cancel) == []


async def test_streamed_completion_equals_the_whole(start, core):
    core.script = saying("héllo 👩‍👩‍👧‍👦 数学")
    async with start() as s:
        ask = {"prompt": [104, 105], "return_token_ids": True, "logprobs": 1}
        whole = (await s.http.post("/v1/completions", json=ask)).json()["choices"][0]
        r = await s.http.post("/v1/completions", json=ask | {"stream": True})
    assert r.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(r.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(c["text"] for c in choices) == whole["text"] == "héllo 👩‍👩‍👧‍👦 数学"
    assert not any("\ufffd" in c["text"] for c in choices)
    assert [i for c in choices for i in c["token_ids"]] == whole["token_ids"]
    assert [p for c in choices for p in c["logprobs"]["token_logprobs"]] == (
        whole["logprobs"]["token_logprobs"]
    )
    assert [o for c in choices for o in c["logprobs"]["text_offset"]] == (
        whole["logprobs"]["text_offset"]
    )
    assert [c.get("prompt_token_ids") for c in choices] == [[104, 105]] + [None] * (
        len(choices) - 1
    )
    reasons = [c["finish_reason"] for c in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_chat_and_its_stream(start):
    ask = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": None,
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": None,
        "return_token_ids": True,
    }
    async with start() as s:
        whole = (await s.http.post("/v1/chat/completions", json=ask)).json()
        r = await s.http.post(
            "/v1/chat/completions",
            json=ask | {"stream": True, "stream_options": {"include_usage": True}},
        )
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hel"}
    assert choice["finish_reason"] == "length"
    assert [each["token"] for each in choice["logprobs"]["content"]] == list("hel")
    assert choice["logprobs"]["content"][1]["bytes"] == [101]
    assert whole["prompt_token_ids"] == [256, *b"user\nhi", 257, 10, 256, *b"assistant\n"]
    *chunks, usage, done = events(r.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all(chunk["usage"] is None for chunk in chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "hel"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


ERRORS = [
    (InvalidRequest("prompt: too long", field="prompt"), 400, None),
    (QueueFull("full", retry_after_s=1.2), 429, "2"),
    (ServiceUnavailable("none", retry_after_s=0.1), 503, "1"),
    (DeadlineExceeded("late"), 504, None),
    (WorkerFailure("broken"), 500, None),
]


async def test_an_error_before_the_first_byte_is_a_status(start, core):
    async with start() as s:
        for (error, status, retry_after), stream in product(ERRORS, (False, True)):
            core.script = failing(error)
            r = await s.http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
            assert r.status_code == status
            assert r.headers.get("retry-after") == retry_after
            described = r.json()["error"]
            assert described["message"] == error.message
            assert described["param"] == error.field
            assert described["code"] == error.reason


async def test_an_error_in_mid_stream_ends_it_without_the_end_mark(start, core):
    core.script = failing(WorkerFailure("chip lost"), after="abc")
    async with start() as s:
        r = await s.http.post("/v1/completions", json={"prompt": "hi", "stream": True})
        whole = await s.http.post("/v1/completions", json={"prompt": "hi"})
    *chunks, last = events(r.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert last["error"]["message"] == "chip lost"
    assert whole.status_code == 500


BAD_BODIES = [
    (b"{", "body"),
    (b"", "body"),
    (b"[1]", "body"),
    (b"\xff\xfe{}", "body"),
    (b"NaN", "body"),
    (b'{"prompt": "hi", "temperature": nan}', "body"),
    (b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", "body"),
    (b'{"prompt": "hi", "max_tokens": 1' + b"0" * 9000 + b"}", "body"),
]
BAD_FIELDS = [
    *((name, "NaN") for name in ("seed", "max_tokens", "logprobs", "top_k", "top_p", "min_p")),
    *((name, "NaN") for name in ("presence_penalty", "repetition_penalty", "logit_bias")),
    *(("stop_token_ids", value) for value in ("[NaN]", '[1, "2"]', "[-1]", "[259]", "5")),
    *(("max_completion_tokens", value) for value in ("Infinity", "0", "-1", "1" + "0" * 400)),
    *(("max_tokens", value) for value in ("1.5", "true", "0", "257", "1" + "0" * 400)),
    *(("temperature", value) for value in ("1e999", '"0"', "-0.5", "101", "1" + "0" * 400)),
    *(("top_p", value) for value in ("-0.1", "1.5")),
    *(("min_p", value) for value in ("-0.1", "1.5")),
    *(("top_k", value) for value in ("-2", "1.5")),
    *(("presence_penalty", value) for value in ("2.5", "-2.5")),
    *(("frequency_penalty", value) for value in ("2.5", "-2.5")),
    *(("repetition_penalty", value) for value in ("0", "-1", "101")),
    *(("seed", value) for value in ("-1", "1" + "0" * 400)),
    *(("logit_bias", f'{{"{key}": 1}}') for key in ("259", "1000000000", "-1", "x", "9" * 30)),
    *(("logit_bias", f'{{"1": {bias}}}') for bias in ("1e9", "-101", "NaN", '"1"', "true")),
    *(("n", value) for value in ("0", "-1", "1000", "1.0", "true")),
    ("best_of", "2"),
    *(("stop", value) for value in ('""', '["a", ""]', "5", "[1]", "[" * 900 + "]" * 900)),
    ("stop", str([str(i) for i in range(100)]).replace("'", '"')),
    ("min_tokens", "-1"),
    *(("logprobs", value) for value in ("-1", "21", "true")),
    *(("prompt_logprobs", value) for value in ("-1", "21", "true")),
    ("top_logprobs", "2"),
    ("priority", "1"),
    ("cache_salt", f'"{"x" * 257}"'),
    *((name, '"yes"') for name in ("stream", "echo", "ignore_eos")),
    ("response_format", '{"type": "json_object"}'),
    ("tools", "[1]"),
    *(("prompt", value) for value in ("5", "[1, NaN]", "[1, 2.0]", '["a", 1]', '[[1], "a"]')),
    *(("prompt", value) for value in ('""', "[]", "[[]]", '["a", ""]', "[[1], []]", "null")),
    *(
        ("prompt", value)
        for value in ("[-1]", "[259]", f"[{10**18}]", f"[{10**300}]", "[[1], [300]]")
    ),
    *(("prompt", value) for value in ('"\\ud800"', str([1] * 256), str([[1]] * 129))),
]


async def test_bad_bodies_are_refused_by_name_before_any_event(start, core):
    bodies = [(raw, field) for raw, field in BAD_BODIES]
    for field, value in BAD_FIELDS:
        prompt = "" if field == "prompt" else '"prompt": "hi", '
        bodies.append((f'{{{prompt}"{field}": {value}}}'.encode(), field))
        if field != "stream":
            bodies.append((f'{{{prompt}"stream": true, "{field}": {value}}}'.encode(), field))
    async with start() as s:
        for raw, field in bodies:
            r = await s.http.post("/v1/completions", content=raw)
            assert r.status_code == 400, raw[:80]
            assert r.headers["content-type"] == "application/json"
            error = r.json()["error"]
            assert error["param"] == field, raw[:80]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith(field), raw[:80]
            assert len(error["message"]) < 1000
        assert core.of(Submit) == []
        good = await s.http.post("/v1/completions", json={"prompt": "hi"})
    assert good.status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_a_temperature_that_is_no_number_is_refused_as_over_grpc(start, number):
    stub_request = inference_pb2.GenerateRequest(
        prompt="hi", sampling={"temperature": float(number)}
    )
    async with start() as s:
        raw = b'{"prompt": "hi", "temperature": ' + number.encode() + b"}"
        over_http = await s.http.post("/v1/completions", content=raw)
        stub = inference_pb2_grpc.InferenceServiceStub(s.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(stub_request).read()
    assert over_http.status_code == 400
    described = over_http.json()["error"]
    assert described["param"] == "temperature"
    assert described["message"] == caught.value.details()
    assert "between 0 and 100" in described["message"]


async def test_a_body_that_stops_coming_is_given_up(start, core):
    async with start(stream_buffer_stall_s=0.2) as s:
        client = await anyio.connect_tcp("127.0.0.1", s.http_port)
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{"
        )
        with anyio.fail_after(5):
            head = await client.receive()
        assert b" 408 " in head.splitlines()[0]
        await client.aclose()
    assert core.of(Submit) == []


BAD_MESSAGES: list = [
    ([], "empty"),
    ([{"role": "robot", "content": "x"}], "no robots"),
    ([{"content": "x"}], "role"),
    ([{"role": "user", "content": 5}], "content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text"),
    (["hi"], "object"),
    ("hi", "list"),
]


async def test_bad_messages_are_refused_with_the_reason(start):
    async with start() as s:
        for messages, reason in BAD_MESSAGES:
            r = await s.http.post(
                "/v1/chat/completions", json={"messages": messages, "stream": True}
            )
            assert r.status_code == 400, messages
            assert reason in r.json()["error"]["message"], messages


async def test_unknown_model_path_and_method(start):
    async with start() as s:
        model = await s.http.post("/v1/completions", json={"prompt": "hi", "model": "gpt-9"})
        path = await s.http.get("/nowhere")
        method = await s.http.get("/v1/completions")
    assert model.status_code == 404
    assert "'tiny', 'default'" in model.json()["error"]["message"]
    assert model.json()["error"]["code"] == "MODEL_NOT_FOUND"
    assert (path.status_code, path.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")


async def test_a_body_over_the_limit_is_refused(start):
    async with start(http_body_bytes_max=100_000) as s:
        r = await s.http.post("/v1/completions", json={"prompt": "x" * 500_000})
        large = await s.http.post("/v1/completions", json={"prompt": "x" * 80_000})
    assert r.status_code == 413
    assert "100000 bytes" in r.json()["error"]["message"]
    assert large.status_code == 400
    assert "80000 bytes" in large.json()["error"]["message"]


async def test_models_health_flush_and_request_id(start):
    async with start() as s:
        models = (await s.http.get("/v1/models")).json()
        serving = await s.http.get("/health", headers={"X-Request-Id": "mine-1"})
        s.intake.deliver(ServingChanged(()))
        down = await s.http.get("/health", headers={"X-Request-Id": "not\tprintable"})
        flushed = await s.http.post("/admin/cache/flush")
    assert [model["id"] for model in models["data"]] == ["tiny", "default"]
    assert serving.status_code == 200
    assert serving.json()["status"] == "serving"
    assert serving.headers["x-request-id"] == "mine-1"
    assert down.status_code == 503
    assert len(down.headers["x-request-id"]) == 32
    assert flushed.json() == {"blocks_freed": 41}


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_a_client_that_leaves_cancels_its_request(start, core, stream):
    core.interval_s = 0.02
    core.script = saying("x" * 200)
    async with start() as s:
        client = await _raw_post(s, b'{"prompt": "hi", "stream": ' + stream + b"}")
        await until(lambda: core.of(Submit) != [])
        if stream == b"true":
            await client.receive()
        await client.aclose()
        await until(lambda: core.of(Cancel) != [])
        await until(lambda: s.intake.running_count == 0)
    assert core.of(End) == []
    assert core.of(Cancel)[0].request_id == core.last_request.request_id


async def _raw_post(s, body: bytes):
    """A connection that has sent a request and reads only when told to."""
    client = await anyio.connect_tcp("127.0.0.1", s.http_port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    await client.send(head.encode() + body)
    return client


async def test_a_reader_that_stalls_is_cancelled_and_others_do_not_notice(start, core, tiny_model):
    # A control character is six bytes of JSON: the buffers of both sides are full after a while.
    many = 50_000
    core.script = lambda request: [delta(request, i * many, [1] * many) for i in range(100)]
    core.tokens_max = 10**9
    endless = replace(tiny_model, context_tokens=10**9)
    async with start(endless, stream_buffer_stall_s=0.3) as s:
        stalled = await _raw_post(s, b'{"prompt": "hi", "stream": true}')
        await until(lambda: core.of(Submit) != [])
        stalled_id = core.last_request.request_id
        core.script = saying("fine")
        other = await s.http.post("/v1/completions", json={"prompt": "hi"})
        assert other.json()["choices"][0]["text"] == "fine"
        await until(lambda: core.of(Cancel) != [])
        await until(lambda: s.intake.running_count == 0)
        assert core.of(Cancel)[0].request_id == stalled_id
        await stalled.aclose()


async def test_draining_refuses_new_requests_and_lets_running_ones_finish(start, core):
    core.interval_s = 0.02
    async with start() as s, anyio.create_task_group() as tasks:
        results = []

        async def ask() -> None:
            results.append(await s.http.post("/v1/completions", json={"prompt": "hi"}))

        tasks.start_soon(ask)
        await until(lambda: s.intake.running_count == 1)
        s.intake.refuse_new("draining")
        refused = await s.http.post("/v1/completions", json={"prompt": "hi"})
        health = await s.http.get("/health")
        await until(lambda: s.intake.running_count == 0)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert health.status_code == 503
    assert results[0].json()["choices"][0]["text"] == "hello"


async def test_an_answer_counts_until_its_client_has_it(start, core, tiny_model):
    """Which is what a drain waits for."""
    ids_count, choices_count = 500_000, 6
    ask = {"prompt": [1] * ids_count, "n": choices_count, "echo": True, "max_tokens": 0}
    async with start(replace(tiny_model, context_tokens=10**9)) as s:
        client = await _raw_post(s, json.dumps(ask).encode())
        received = len(await client.receive())
        s.intake.refuse_new("draining")
        await anyio.sleep(0.5)
        assert s.intake.running_count == 1
        while received < 6 * ids_count * choices_count:  # such a character is six bytes of JSON
            received += len(await client.receive())
        await until(lambda: s.intake.running_count == 0)
        await client.aclose()
    assert core.of(Submit) == []


async def test_stop_ends_a_running_answer_with_an_error(start, core):
    core.script = lambda _: []
    async with start() as s, anyio.create_task_group() as tasks:
        results = []

        async def ask() -> None:
            results.append(await s.http.post("/v1/completions", json={"prompt": "hi"}))

        tasks.start_soon(ask)
        await until(lambda: core.of(Submit) != [])
        await s.intake.stop()
    assert results[0].status_code == 503
    assert [type(event) for event in core.events] == [Submit, Cancel]


async def test_logprobs_that_are_no_numbers_become_null(start, core):
    core.script = lambda request: [
        delta(request, 0, [65, END], logprobs=(float("nan"), float("-inf")))
    ]
    async with start() as s:
        r = await s.http.post("/v1/completions", json={"prompt": "hi", "logprobs": 0})
    assert r.json()["choices"][0]["logprobs"]["token_logprobs"] == [None, None]
    assert FinishReason.STOP.value == r.json()["choices"][0]["finish_reason"]


async def _no_app(_scope, _receive, _send) -> None:
    """Never called: its server only listens."""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_connections_send_small_responses_at_once(host):
    server = HttpServer(ControlPlaneConfig(model_path="", host=host, http_port=0), _no_app)
    with server._listen() as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_the_date_is_kept_and_stopping_does_not_wait_for_the_next(start):
    async with start() as s:
        dates = set()
        with anyio.fail_after(5):
            while len(dates) < 2:
                dates.add((await s.http.get("/health")).headers["date"])
                await anyio.sleep(0.1)
        await s.http.aclose()
        started = anyio.current_time()
    assert anyio.current_time() - started < 0.9
