"""OA05: unknown models were accepted, errors had another shape, null max_tokens failed with 500 and
max_completion_tokens was ignored.

Refusals are the exceptions that OpenAI's own client raises for them, with message, type, param and
code. null is the default of every field, max_completion_tokens is obeyed and wins over max_tokens
(decision), and a field nobody knows is ignored (decision). gRPC refuses the same.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import openai
import pytest

from protos import inference_pb2
from tests.field.answers import Refused, grpc_refusal, http_refusal, strict_json
from tests.field.field_cluster import CONTEXT, PROTOCOLS, FieldCluster
from tests.field.shared_specs import MIX

pytestmark = pytest.mark.end_to_end

CLUSTER = MIX
TEXT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": TEXT}]
ENDPOINTS = {
    "completion": ("/v1/completions", {"prompt": TEXT}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
}
BY_ENDPOINT = pytest.mark.parametrize(("path", "body"), ENDPOINTS.values(), ids=ENDPOINTS)
FIELDS = (
    *("model", "n", "temperature", "top_k", "top_p", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *("min_tokens", "max_tokens", "max_completion_tokens", "ignore_eos", "prompt_logprobs"),
    *("stream", "stream_options", "priority", "cache_salt", "return_token_ids", "logprobs"),
    *("top_logprobs", "echo", "best_of", "tools", "response_format", "suffix", "user", "adapter"),
)
WRONG_TYPES: dict[str, tuple[object, ...]] = {
    "model": (5, ["default"]),
    "n": ("1", 1.5, True, [1], {}),
    "temperature": ("1", [], {}, True),
    "top_k": ("5", 1.5),
    "top_p": ("1", []),
    "min_p": ("0",),
    "presence_penalty": ("0",),
    "frequency_penalty": ("0",),
    "repetition_penalty": ("1",),
    "logit_bias": ("5", [5], 5, {"5": "1"}, {"5": None}, {"5": True}),
    "seed": ("1", 1.5),
    "stop": (5, [5], {}, [None]),
    "stop_token_ids": (5, ["5"], {}, [None], [True], [1.5]),
    "min_tokens": ("1", 1.5),
    "max_tokens": ("5", 5.5, [], True),
    "max_completion_tokens": ("5", 5.5),
    "ignore_eos": ("true", 1, []),
    "prompt_logprobs": ("1", True),
    "stream": ("true", 1),
    "stream_options": ("include_usage", [], {"include_usage": "yes"}),
    "priority": ("0",),
    "cache_salt": (5,),
    "return_token_ids": ("true",),
    "prompt": (5, {}, True, [None], [TEXT, 5], [5, TEXT], [[5], TEXT], [1.5], [[True]]),
    "messages": ("hello", {}, 5, [5], [[]], [{}], [{"role": 5}], [{"role": "user", "content": 5}]),
}


@pytest.fixture
def client(field: FieldCluster) -> Iterator[openai.OpenAI]:
    """The official client; it does not try again by itself."""
    connection = openai.OpenAI(
        base_url=f"{field.cluster.http}/v1", api_key="none", max_retries=0, timeout=60.0
    )
    with closing(connection):
        yield connection


def create(client: openai.OpenAI, **wanted: Any) -> Any:
    """Asks the endpoint that takes this kind of prompt."""
    resource = client.chat.completions if "messages" in wanted else client.completions
    return resource.create(**({"model": "default"} | wanted))


@BY_ENDPOINT
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model(
    client: openai.OpenAI, path: str, body: dict[str, Any], stream: bool
) -> None:
    del path
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, **body, model="gpt-unknown", stream=stream)
    check_document(caught.value, "model", "MODEL_NOT_FOUND")
    assert "gpt-unknown" in caught.value.message
    for name in ("", "default"):
        assert create(client, **body, model=name, max_tokens=1).choices


def check_document(error: openai.APIStatusError, param: str, code: str) -> None:
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert param in error.message
    assert strict_json(error.response.text)["error"].keys() == {"message", "type", "param", "code"}


@BY_ENDPOINT
def test_wrong_types(field: FieldCluster, path: str, body: dict[str, Any]) -> None:
    """Strict types: "1" is no number and 1 is no truth. The field is named, whichever it is."""
    for name, values in WRONG_TYPES.items():
        if name in ("prompt", "messages") and name not in body:
            continue
        for value in values:
            response = field.http.post(path, json=body | {"max_tokens": 1, name: value})
            assert response.status_code == 400, f"{name}: {value!r}"
            refusal = http_refusal(400, response.text)
            assert (refusal.parameter, refusal.reason) == (name, "INVALID_REQUEST"), f"{value!r}"


def test_wrong_types_are_the_clients_exception(client: openai.OpenAI) -> None:
    for name, value in (("max_tokens", "five"), ("logit_bias", [1]), ("stop", 5), ("n", 1.5)):
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, messages=MESSAGES, **{name: value})
        check_document(caught.value, name, "INVALID_REQUEST")


@BY_ENDPOINT
def test_what_is_no_json(field: FieldCluster, path: str, body: dict[str, Any]) -> None:
    del body
    nested = b'{"prompt": ' + b"[" * 100_000
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "a"} x',
        nested,
    ):
        response = field.http.post(path, content=content)
        assert response.status_code == 400, content[:20]
        assert http_refusal(400, response.text).parameter == "body"
        assert "Traceback" not in response.text


@BY_ENDPOINT
def test_null_is_the_default(field: FieldCluster, path: str, body: dict[str, Any]) -> None:
    greedy = {"temperature": 0, "return_token_ids": True, "max_tokens": 8, "ignore_eos": True}
    expected = strict_json(field.http.post(path, json=body | greedy).text)
    for name in FIELDS:
        if name in greedy:
            continue
        response = field.http.post(path, json=body | greedy | {name: None})
        assert response.status_code == 200, f"{name}: {response.text}"
        answer = strict_json(response.text)
        assert answer["choices"] == expected["choices"]
    # Without a limit the answer goes on to its end or to that of the context.
    for limits in ({}, {"max_tokens": None, "max_completion_tokens": None}):
        unlimited = {name: value for name, value in greedy.items() if name != "max_tokens"}
        wanted = body | unlimited | limits
        answer = strict_json(field.http.post(path, json=wanted).text)
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"
    nulls = body | dict.fromkeys(FIELDS) | {"max_completion_tokens": 3}
    assert field.http.post(path, json=nulls).status_code == 200


@BY_ENDPOINT
def test_the_newer_name_of_max_tokens(
    client: openai.OpenAI, path: str, body: dict[str, Any]
) -> None:
    del path
    for limits, newer, count in (
        ({}, {"max_completion_tokens": 5}, 5),
        ({"max_tokens": 3}, {"max_completion_tokens": 5}, 5),
        ({"max_tokens": 7}, {"max_completion_tokens": 5}, 5),
        ({"max_tokens": 7}, {"max_completion_tokens": None}, 7),
    ):
        extra = {"ignore_eos": True} | newer
        answer = create(client, **body, **limits, extra_body=extra)
        assert answer.usage.completion_tokens == count
    for limit in (0, -1, CONTEXT):
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, **body, extra_body={"max_completion_tokens": limit})
        check_document(caught.value, "max_completion_tokens", "INVALID_REQUEST")


@BY_ENDPOINT
def test_a_field_nobody_knows_changes_nothing(
    client: openai.OpenAI, path: str, body: dict[str, Any]
) -> None:
    del path
    ask = body | {"temperature": 0, "max_tokens": 5}
    expected = create(client, **ask)
    extra = {"shoe_size": 43, "metadata": {"a": [1]}, "store": True, "": None}
    answer = create(client, **ask, user="somebody", extra_body=extra)
    assert answer.choices == expected.choices


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_refuses_an_unknown_model(field: FieldCluster, protocol: str) -> None:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, TEXT, model="gpt-unknown", max_tokens=1)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert (caught.value.parameter, caught.value.reason) == ("model", "MODEL_NOT_FOUND")


def test_grpc_refuses_what_is_no_message(field: FieldCluster) -> None:
    """Bytes that are none, and messages with fields nobody knows, which are ignored."""
    call = field.client.channel.unary_stream(
        "/polychip.v1.InferenceService/Generate",
        request_serializer=bytes,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call(b"\xff\xff", timeout=30))
    assert grpc_refusal(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT
    request = field.grpc_request(TEXT, max_tokens=3, ignore_eos=True).SerializeToString()
    unknown = b"\xfa\x7f\x03new"  # field 2047, three bytes
    messages = list(call(request + unknown, timeout=30))
    assert messages[-1].usage.completion_tokens == 3
