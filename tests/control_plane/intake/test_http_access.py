"""Who gets in over HTTP and how much: keys, metrics, models, sizes of bodies, clients gone."""

import json
import threading
from contextlib import suppress

import anyio
import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from control_plane.config import ControlPlaneConfig
from control_plane.errors import QueueFull
from control_plane.intake import http_body
from control_plane.intake.byte_budget import ReadBudget
from control_plane.intake.http_body import BodyReader, BodyTooLarge
from control_plane.intake.tokenizer import Tokenizer
from control_plane.scheduling.messages import Cancel, Submit
from tests.control_plane.intake.fake_core import until

pytestmark = pytest.mark.anyio

GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/nothing"),
    ("POST", "/admin/cache/flush"),
]
KEY = {"authorization": "Bearer right"}


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer wrong"}])
async def test_without_a_key_nothing_is_served_but_health_and_metrics(start, core, header):
    async with start(api_keys=("other", "right")) as s:
        for method, path in GUARDED:
            r = await s.http.request(method, path, headers=header)
            assert r.status_code == 401, path
            assert r.headers["www-authenticate"] == "Bearer"
            assert len(r.headers["x-request-id"]) == 32
            error = r.json()["error"]
            assert error["type"] == "authentication_error"
            assert error["code"] == "INVALID_API_KEY"
        assert core.events == []
        assert (await s.http.get("/health", headers=header)).status_code == 200
        assert (await s.http.get("/metrics", headers=header)).status_code == 200


async def test_with_a_key_everything_is(start):
    async with start(api_keys=("other", "right")) as s:
        answer = await s.http.post("/v1/completions", json={"prompt": "hi"}, headers=KEY)
        models = await s.http.get("/v1/models", headers=KEY)
        flushed = await s.http.post("/admin/cache/flush", headers=KEY)
    assert answer.json()["choices"][0]["text"] == "hello"
    assert models.status_code == flushed.status_code == 200


async def test_a_large_body_without_a_key_gets_its_answer(start):
    async with start(api_keys=("right",), http_body_bytes_max=1 << 20) as s:
        r = await s.http.post("/v1/completions", json={"prompt": "x" * (3 << 20)})
    assert r.status_code == 401


async def test_metrics_are_those_of_the_service(start):
    async with start() as s:
        await s.http.post("/v1/completions", json={"prompt": "hi"})
        await s.http.post("/v1/completions", content=b"no JSON")
        r = await s.http.get("/metrics")
        expected = s.metrics.expose()[1]
    assert r.headers["content-type"] == expected
    assert 'polychip_requests_received_total{protocol="http"} 2.0' in r.text
    assert 'polychip_request_failures_total{reason="INVALID_REQUEST"} 1.0' in r.text


@pytest.mark.parametrize("name", ["tiny", "default"])
async def test_one_model(start, name):
    async with start() as s:
        listed = (await s.http.get("/v1/models")).json()["data"]
        r = await s.http.get(f"/v1/models/{name}")
    assert r.status_code == 200
    assert r.json() in listed
    assert r.json()["id"] == name


@pytest.mark.parametrize("name", ["gpt-9", "some/model", "tiny/x"])
async def test_a_model_that_is_not_served(start, name):
    async with start() as s:
        r = await s.http.get(f"/v1/models/{name}")
    assert r.status_code == 404
    error = r.json()["error"]
    assert (error["code"], error["param"]) == ("MODEL_NOT_FOUND", "model")
    assert repr(name) in error["message"]
    assert "'tiny'" in error["message"]


# ---------------------------------------------------------------- bodies


async def _send(s, raw: bytes):
    client = await anyio.connect_tcp("127.0.0.1", s.http_port)
    await client.send(raw)
    return client


def head_of(length: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: a", f"content-length: {length}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def test_a_client_that_asks_first_is_told_before_it_sends(start):
    async with start(http_body_bytes_max=1000) as s:
        client = await _send(s, head_of(50_000, "expect: 100-continue"))
        with anyio.fail_after(5):
            answer = await client.receive()
        await client.aclose()
    assert b" 413 " in answer.splitlines()[0]
    assert b"connection: close" in answer.lower()


async def test_a_chunked_body_over_the_limit_is_refused(start):
    async def parts():
        for _ in range(20):
            yield b" " * 1000

    async with start(http_body_bytes_max=10_000) as s:
        r = await s.http.post("/v1/completions", content=parts())
    assert r.status_code == 413


async def test_all_bodies_together_are_bounded(start):
    async with start(intake_bytes_max=100_000) as s:
        slow = await _send(s, head_of(90_000) + b" " * 60_000)
        full = None
        with anyio.fail_after(5):
            while full is None or full.status_code == 200:
                full = await s.http.post(
                    "/v1/completions", content=b'{"prompt": "hi"}' + b" " * 50_000
                )
        small = await s.http.post("/v1/completions", json={"prompt": "hi"})
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert small.status_code == 200
        await slow.aclose()
        with anyio.fail_after(5):
            while full.status_code != 200:
                full = await s.http.post(
                    "/v1/completions", content=b'{"prompt": "hi"}' + b" " * 50_000
                )


@pytest.mark.parametrize("last", ["end", "gone", "too large"])
async def test_bytes_are_given_back_however_reading_ends(last):
    parts = [b"a" * 60, b"b" * 30] + ([b"c" * 20] if last == "too large" else [])

    async def receive():
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": True}
        if last == "gone":
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    budget = ReadBudget(100)
    reader = BodyReader(ControlPlaneConfig(model_path="", intake_bytes_max=100), budget)
    request = Request({"type": "http", "headers": []}, receive)
    if last == "end":
        with await reader.read(request) as body:
            assert len(body.raw) == 90
            budget.check(10)
            with pytest.raises(QueueFull) as caught:
                budget.check(11)
            assert caught.value.retry_after_s is not None
    else:
        with pytest.raises((ClientDisconnect, BodyTooLarge)):
            await reader.read(request)
    budget.check(100)


# ---------------------------------------------------------------- bodies that take their time


async def _drip(client, until_s: float) -> None:
    """A byte now and then, and never the end."""
    with anyio.move_on_after(until_s), suppress(anyio.BrokenResourceError):
        while True:
            await client.send(b" ")
            await anyio.sleep(0.05)


async def _answer_to_a_drip(s, head: bytes) -> bytes:
    """What a client reads that sends on and on; the connection must be closed after it."""
    client = await _send(s, head)
    received = b""
    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_drip, client, 8)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    received += await client.receive()
            tasks.cancel_scope.cancel()
    await client.aclose()
    return received


async def test_a_body_has_a_deadline_however_steadily_it_comes(start, core):
    async with start(body_deadline_s=0.4, intake_bytes_max=2000) as s:
        received = await _answer_to_a_drip(s, head_of(1500) + b" " * 1000)
        assert b" 408 " in received.splitlines()[0]
        assert b"BODY_STALLED" in received
        assert b"within 0.4 s" in received
        assert b"connection: close" in received.lower()
        # What it held is free again.
        full = await s.http.post("/v1/completions", content=b'{"prompt": "hi"}' + b" " * 1500)
        assert full.status_code == 200
    assert len(core.of(Submit)) == 1


REFUSED_HEADS = [
    head_of(1500),  # without a key
    head_of(50_000, "authorization: Bearer right"),
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5dc\r\n",
]


@pytest.mark.parametrize("head", REFUSED_HEADS, ids=["no key", "too large", "no key, chunked"])
async def test_a_refused_body_is_not_waited_for_long(start, head, monkeypatch):
    monkeypatch.setattr(http_body, "DROP_DEADLINE_S", 0.3)
    async with start(api_keys=("right",), http_body_bytes_max=2000) as s:
        received = await _answer_to_a_drip(s, head)
    assert (b" 413 " if b"right" in head else b" 401 ") in received.splitlines()[0]
    assert b"connection: close" in received.lower()


# ---------------------------------------------------------------- clients that leave

BODY = b'{"prompt": "hi"}'


async def test_a_client_that_leaves_in_its_body(start, core):
    async with start() as s:
        client = await _send(s, head_of(5000) + b" " * 1000)
        await anyio.sleep(0.05)
        await client.aclose()
        answer = await s.http.post("/v1/completions", json={"prompt": "hi"})
        assert answer.status_code == 200
        await until(lambda: s.intake.running_count == 0)
    assert len(core.of(Submit)) == 1


async def test_a_client_that_leaves_while_its_text_is_tokenized(start, core, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow_encode(self, text, *, add_special):
        entered.set()
        go_on.wait(10)
        return encode(self, text, add_special=add_special)

    async with start() as s:
        monkeypatch.setattr(Tokenizer, "encode", slow_encode)
        client = await _send(s, head_of(len(BODY)) + BODY)
        await until(entered.is_set)
        assert s.intake.running_count == 1
        await client.aclose()
        await until(lambda: s.intake.running_count == 0)
        go_on.set()
        assert core.events == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_choices_wait(start, core, stream):
    core.script = lambda _: []
    body = json.dumps({"prompt": ["a", "b"], "n": 2, "stream": stream}).encode()
    async with start() as s:
        client = await _send(s, head_of(len(body)) + body)
        await until(lambda: len(core.of(Submit)) == 4)
        await client.aclose()
        await until(lambda: s.intake.running_count == 0)
    assert len(core.of(Cancel)) == 4
    assert core.live == set()


async def test_two_clients_may_send_the_same_request_id(start, core):
    core.script = lambda _: []
    async with start() as s:
        clients = [
            await _send(s, head_of(len(BODY), "x-request-id: same") + BODY) for _ in range(2)
        ]
        await until(lambda: len(core.of(Submit)) == 2)
        for client in clients:
            await client.aclose()
        await until(lambda: s.intake.running_count == 0)


async def test_a_refusal_by_its_size_does_not_end_the_connection(start):
    async with start(http_body_bytes_max=1000) as s:
        url = f"http://127.0.0.1:{s.http_port}"
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=5) as one:
            refused = await one.post("/v1/completions", content=b" " * 5000)
            answer = await one.post("/v1/completions", json={"prompt": "hi"})
    assert (refused.status_code, answer.status_code) == (413, 200)
