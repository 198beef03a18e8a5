"""OA03: a wrong request that asked for a stream got status 200, and the error inside the stream.

Every refusal has the same status and the same JSON whether a stream was asked for or not, before
any byte of one; over gRPC it ends the call before any message.
"""

import json
from collections.abc import Mapping
from typing import Any

import grpc
import httpx
import pytest

from tests.fakes.field_tokenizers import SIZE
from tests.field.answers import grpc_refusal, http_refusal, strict_json
from tests.field.calls import LEFT, leave_all, open_call, wait_until, waiting_count
from tests.field.field_cluster import CONTEXT, QUEUE_MAX, FieldCluster
from tests.field.shared_specs import MIX

pytestmark = pytest.mark.end_to_end

CLUSTER = MIX
TEXT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": TEXT}]
REPLY_DEADLINE_S = 30.0
BODY_BYTES_MAX = 16 << 20

Changes = Mapping[str, Any]
"""Fields that replace those of a good request; null takes one away."""

BOTH: list[Changes] = [
    {"temperature": -1},
    {"temperature": 100.5},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_p": 1.5},
    {"top_p": -0.1},
    {"top_p": float("nan")},
    {"top_k": -2},
    {"min_p": 2},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"logit_bias": {SIZE: 1}},
    {"logit_bias": {10**9: 1}},
    {"logit_bias": {5: 1e9}},
    {"logit_bias": {5: float("nan")}},
    {"stop": [""]},
    {"stop": ["x" * 257]},
    {"stop": ["x"] * 17},
    {"stop_token_ids": [SIZE]},
    {"n": 0},
    {"n": 1000},
    {"min_tokens": 5, "max_tokens": 4},
    {"max_tokens": 0},
    {"max_tokens": CONTEXT},
    {"priority": 1},
    {"cache_salt": "x" * 257},
    {"model": "gpt-unknown"},
]
"""What either protocol can say, to either endpoint."""
HTTP_ONLY: list[Changes] = [
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"one": 1}},
    {"seed": -1},
    {"stop_token_ids": [-1]},
    {"max_tokens": -1},
    {"max_tokens": 10**18},
    {"max_tokens": "five"},
    {"response_format": {"type": "json_object"}},
]
TEXT_BOTH: list[Changes] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [SIZE]},
    {"prompt": [5] * CONTEXT},
    {"prompt": [5] * (CONTEXT + 1)},
    {"prompt": TEXT * 10 * CONTEXT},
]
TEXT_HTTP_ONLY: list[Changes] = [
    {"prompt": None},
    {"prompt": [TEXT, ""]},
    {"prompt": [[5], []]},
    {"prompt": [-1]},
    {"prompt": [10**18]},
    {"prompt": "\ud800"},
    {"prompt": 5},
    {"logprobs": 21},
    {"logprobs": -1},
    {"suffix": "there"},
]
CHAT_HTTP_ONLY: list[Changes] = [
    {"messages": None},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "user", "content": TEXT * 10 * CONTEXT}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"content": TEXT}]},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 3},
    {"echo": True},
    {"tools": [{"type": "function"}]},
]
COMPLETION = ("/v1/completions", {"prompt": TEXT, "max_tokens": 4})
CHAT = ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4})
CASES = {
    "completion": (COMPLETION, [*BOTH, *HTTP_ONLY, *TEXT_BOTH, *TEXT_HTTP_ONLY]),
    "chat": (CHAT, [*BOTH, *HTTP_ONLY, *CHAT_HTTP_ONLY]),
}


def post(field: FieldCluster, path: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return field.http.post(path, content=content, headers=headers, timeout=REPLY_DEADLINE_S)


def changed(body: Changes, changes: Changes) -> dict[str, Any]:
    return {name: value for name, value in {**body, **changes}.items() if value is not None}


def check_refused_alike(whole: httpx.Response, streamed: httpx.Response, status: int) -> None:
    """Both are the same document of OpenAI's shape, and no stream began."""
    assert whole.status_code == streamed.status_code == status
    assert streamed.headers["content-type"] == whole.headers["content-type"] == "application/json"
    assert strict_json(streamed.text) == strict_json(whole.text)
    http_refusal(status, streamed.text)


@pytest.mark.parametrize(("endpoint", "cases"), CASES.values(), ids=CASES)
def test_a_refusal_is_the_same_with_stream(
    field: FieldCluster, endpoint: tuple[str, dict[str, Any]], cases: list[Changes]
) -> None:
    path, body = endpoint
    for changes in cases:
        wanted = changed(body, changes)
        whole, streamed = (
            # Python's JSON writes NaN and Infinity, as careless clients do.
            post(field, path, json.dumps(wanted | {"stream": stream}).encode())
            for stream in (False, True)
        )
        status = 404 if "model" in changes else 400
        check_refused_alike(whole, streamed, status)
        refusal = http_refusal(status, streamed.text)
        assert refusal.parameter in changes, f"{changes}: {refusal}"
        assert str(refusal.parameter) in refusal.message


def test_nothing_but_the_prompt_may_be_scored_in_a_stream(field: FieldCluster) -> None:
    """The one field that is refused for the stream itself is refused before it, too."""
    for path, body in (COMPLETION, CHAT):
        response = post(field, path, json.dumps(body | {"prompt_logprobs": 1}).encode())
        assert response.status_code == 200
        wanted = body | {"prompt_logprobs": 1, "stream": True}
        response = post(field, path, json.dumps(wanted).encode())
        refusal = http_refusal(response.status_code, response.text)
        assert (refusal.status, refusal.parameter) == (400, "prompt_logprobs")


@pytest.mark.parametrize("endpoint", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_a_body_over_the_limit_and_one_that_is_no_json(
    field: FieldCluster, endpoint: tuple[str, dict[str, Any]]
) -> None:
    path, body = endpoint
    for broken in (b'{"stream": true, ', b"[]", b"\xff", b""):
        refusal = http_refusal(400, post(field, path, broken).text)
        assert refusal.parameter == "body"
    large = json.dumps(body | {"padding": "x" * BODY_BYTES_MAX})
    check_refused_alike(
        *(
            post(field, path, f'{{"stream": {stream}, {large[1:]}'.encode())
            for stream in ("false", "true")
        ),
        413,
    )


def test_a_full_queue_refuses_streams_before_they_begin(field: FieldCluster) -> None:
    """As many choices as may wait fit an empty queue only, and others wait already."""
    busy: dict[str, Any] = {"max_tokens": CONTEXT // 2, "ignore_eos": True}
    holders = [open_call(field, "grpc", TEXT, n=QUEUE_MAX, **busy)]
    wait_until(lambda: 0 < waiting_count(field) <= QUEUE_MAX // 2, "half the queue is free")
    # Some wait all through what follows, on a slow machine too.
    holders.append(open_call(field, "grpc", TEXT, n=QUEUE_MAX // 2, **busy))
    wait_until(lambda: waiting_count(field) > 0, "some wait")
    for path, body in (COMPLETION, CHAT):
        wanted = body | {"n": QUEUE_MAX}
        whole, streamed = (
            post(field, path, json.dumps(wanted | {"stream": stream}).encode())
            for stream in (False, True)
        )
        check_refused_alike(whole, streamed, 429)
        assert int(streamed.headers["retry-after"]) >= 1
    assert leave_all(holders) == [LEFT] * 2


def test_grpc_refuses_before_any_message(field: FieldCluster) -> None:
    """What both protocols can say is refused alike: same code, same field."""
    path, body = COMPLETION
    for changes in (*BOTH, *TEXT_BOTH):
        parameters = {"max_tokens": 4} | changes
        prompt = parameters.pop("prompt", TEXT)
        request = field.grpc_request(prompt, **parameters)
        with pytest.raises(grpc.RpcError) as caught:
            next(field.client.inference.Generate(request, timeout=REPLY_DEADLINE_S))
        over_grpc = grpc_refusal(caught.value)
        wanted = changed(body, changes) | {"stream": True}
        response = post(field, path, json.dumps(wanted).encode())
        over_http = http_refusal(response.status_code, response.text)
        assert over_grpc.code is over_http.code
        assert over_grpc.reason == over_http.reason
        assert over_grpc.parameter == over_http.parameter
