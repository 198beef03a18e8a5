"""Clients that send noise, or leave before their answer is complete."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import grpc
import httpx

from protos import inference_pb2
from tests.field.answers import grpc_refusal, http_refusal, read_sse, strict_json
from tests.field.exchange import CALL_DEADLINE_S, grpc_message, http_body
from tests.field.field_cluster import CONTEXT, FieldCluster
from tests.field.neutral_request import UINT32_MAX, draw_fine

HTTP_FIELDS = (
    *("model", "prompt", "messages", "n", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop"),
    *("stop_token_ids", "min_tokens", "max_tokens", "max_completion_tokens", "ignore_eos"),
    *("prompt_logprobs", "logprobs", "top_logprobs", "echo", "stream", "stream_options"),
    *("priority", "cache_salt", "return_token_ids", "best_of", "tools", "tool_choice", "suffix"),
    *("response_format", "functions", "adapter", "chat_template", "skip_special_tokens", "user"),
)
NOISE: tuple[object, ...] = (
    *("", "x", "1", "\ud800", "a\udfffb", "\x00", "x" * 100_000),
    *(True, False, 0, -1, 1, 1.5, -0.0, 1e-320, 1e308, 10**40, -(10**40), 10**400, 10**4000),
    *(float("nan"), float("inf")),
    *([], {}, [None], [[]], [[[]]], [{}], {"": None}, {"5": 1}, {"-1": 1}, {"5": "x"}),
    *([1.5], [-1], [10**18], ["\ud800"], ["a", 5], [5] * 5000, {"include_usage": 1}),
    *([{"role": "user"}], [{"role": "\ud800", "content": "\udc00"}], [{"role": 1}]),
    *([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], {"type": "text"}),
)
REFUSED_BY_GRPC = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
LEFT_BY_GRPC = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


RELATED = {"logprobs": "top_logprobs", "stream": "prompt_logprobs"}
"""A field may be fine by itself, and another one then not."""


def spliced(random: Random, content: bytes) -> bytes:
    """The content with a few bytes gone, doubled or replaced."""
    noisy = bytearray(content)
    for _ in range(random.choice((1, 2, 8))):
        at = random.randrange(len(noisy))
        length = random.choice((0, 1, 1, 4))
        noisy[at : at + length] = random.randbytes(random.choice((0, 1, 2)))
        noisy = noisy or bytearray(b"{")
    return bytes(noisy)


# ---------------------------------------------------------------- HTTP


def send_http_noise(field: FieldCluster, number: int, random: Random) -> None:
    """One field of any type, or a body that was damaged: an answer, or a refusal that names it."""
    request = draw_fine(number, random, field.tokenizer)
    path, body = http_body(request, random)
    body |= {"max_tokens": 1, "max_completion_tokens": None, "min_tokens": None}
    if random.random() < 0.3:
        check_http(field, path, spliced(random, json.dumps(body).encode()), None)
        return
    name = random.choice(HTTP_FIELDS)
    body[name] = random.choice(NOISE)
    check_http(field, path, json.dumps(body).encode(), name)


def check_http(field: FieldCluster, path: str, content: bytes, name: str | None) -> None:
    """name: the field at fault, if the body is refused and it is known."""
    shown = content[:500]
    with field.http.stream("POST", path, content=content, timeout=CALL_DEADLINE_S) as response:
        answer = read_sse(response)
    if answer.status == 200:
        assert answer.done if answer.events else strict_json(answer.body), f"{shown!r}"
        assert not any("error" in chunk for chunk in answer.chunks), f"{shown!r}"
        return
    assert answer.status in (400, 404, 429), f"{shown!r}: {answer.status} {answer.body}"
    refusal = http_refusal(answer.status, answer.body)
    if name is not None and answer.status != 429:
        named = {name, "body", RELATED.get(name)}
        assert refusal.parameter in named, f"{shown!r}: {refusal}"


# ---------------------------------------------------------------- gRPC


def send_grpc_noise(field: FieldCluster, number: int, random: Random) -> None:
    """What only gRPC can say, wrong; or a message that was damaged."""
    request = draw_fine(number, random, field.tokenizer)
    message = grpc_message(field, request, request.prompts[0])
    message.sampling.max_tokens = 1
    message.sampling.min_tokens = 0
    if random.random() < 0.3:
        content = spliced(random, message.SerializeToString() or b"\x00")
        refused(field, content)
        return
    name = random.choice(sorted(GRPC_MISTAKES))
    GRPC_MISTAKES[name](message, random)
    found = refused(field, message.SerializeToString())
    assert found is not None, f"{name}: {message} was answered"
    field_name = name.partition(" ")[0]
    assert found == field_name, f"{name}: {found} is named, not {field_name}"


def refused(field: FieldCluster, content: bytes) -> str | None:
    """The field for which the bytes are refused; None if they are answered."""
    call = field.client.channel.unary_stream(
        "/polychip.v1.InferenceService/Generate",
        request_serializer=bytes,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    try:
        for _ in call(content, timeout=CALL_DEADLINE_S):
            pass
    except grpc.RpcError as error:
        refusal = grpc_refusal(error)
        assert refusal.code in REFUSED_BY_GRPC, f"{content[:500]!r}: {refusal}"
        return refusal.parameter or ""
    return None


Message = inference_pb2.GenerateRequest


def no_input(message: Message, _: Random) -> None:
    message.ClearField("prompt")
    message.ClearField("prompt_ids")
    message.ClearField("chat")


def bad_id(message: Message, random: Random) -> None:
    message.request_id = random.choice(("x" * 129, "a\nb", "\x00", "\u200b", "a\u202eb"))


def foreign_ids(message: Message, random: Random) -> None:
    message.resume_output_ids.add(ids=[random.choice((512, UINT32_MAX))])


def too_many_lists(message: Message, random: Random) -> None:
    for _ in range(random.choice((129, 5000))):
        message.resume_output_ids.add(ids=[])


def too_long_lists(message: Message, random: Random) -> None:
    message.resume_output_ids.add(ids=[5] * random.choice((3, CONTEXT, 5000)))


GRPC_MISTAKES: dict[str, Callable[[Message, Random], None]] = {
    "prompt is missing": no_input,
    "request_id": bad_id,
    "resume_output_ids of nobody": foreign_ids,
    "resume_output_ids of no choice": too_many_lists,
    "resume_output_ids too long": too_long_lists,
}


# ---------------------------------------------------------------- leaving


def leave(field: FieldCluster, number: int, random: Random) -> None:
    """Asks for a long answer and leaves at some moment, in one of the ways there are."""
    request = draw_fine(number, random, field.tokenizer)
    unlimited = {"max_tokens", "min_tokens", "prompt_logprobs"}
    fields = {name: value for name, value in request.fields.items() if name not in unlimited}
    request = replace(request, fields=fields)
    if random.random() < 0.5:
        path, body = http_body(request, random)
        leave_http(field, path, body, random)
    else:
        message = grpc_message(field, request, request.prompts[0])
        message.request_id = f"leaving {number}"
        leave_grpc(field, message, random)


def leave_http(field: FieldCluster, path: str, body: dict[str, Any], random: Random) -> None:
    """After some events, or when there was nothing to read for a while."""
    patience = httpx.Timeout(CALL_DEADLINE_S)
    if not body.get("stream"):
        patience = httpx.Timeout(CALL_DEADLINE_S, read=random.uniform(0.001, 0.2))
    events_count = random.randint(0, 8)
    with (
        suppress(httpx.ReadTimeout),
        field.http.stream("POST", path, json=body, timeout=patience) as response,
    ):
        assert response.status_code in (200, 429)
        for _ in islice(response.iter_lines(), events_count):
            pass


def leave_grpc(field: FieldCluster, message: Message, random: Random) -> None:
    """Cancels the call, or the request from another call, or gives it little time."""
    stub = field.client.inference
    way = random.choice(("call", "id", "deadline"))
    deadline_s = random.uniform(0.001, 0.3) if way == "deadline" else CALL_DEADLINE_S
    call = stub.Generate(message, timeout=deadline_s)
    try:
        if way != "deadline":
            for _ in islice(call, random.randint(0, 8)):
                pass
        if way == "call":
            call.cancel()
        elif way == "id":
            request = inference_pb2.CancelRequest(request_id=message.request_id)
            stub.Cancel(request, timeout=CALL_DEADLINE_S)
        for _ in call:
            pass
    except grpc.RpcError as error:
        if error.code() not in LEFT_BY_GRPC:
            raise
