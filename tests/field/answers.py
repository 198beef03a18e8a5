"""What comes back from the service, read the same way over HTTP, HTTP streams and gRPC."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2

FINISH_NAMES = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}
HTTP_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass
class Choice:
    """One choice. deltas: its text piece by piece, as streamed. finish: stop, length, or None."""

    ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.deltas)


@dataclass
class Answer:
    """A finished answer. raw: what it was read from: the JSON body, the chunks of a stream, or the
    messages of a gRPC call. group, retractions, failovers, seed: as usage reports them.
    """

    choices: list[Choice]
    prompt_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    group: str
    retractions: int
    failovers: int
    seed: int
    raw: list[Any]

    @property
    def ids(self) -> list[int]:
        """Of the only choice."""
        return self._only.ids

    @property
    def text(self) -> str:
        """Of the only choice."""
        return self._only.text

    @property
    def deltas(self) -> list[str]:
        """Of the only choice."""
        return self._only.deltas

    @property
    def logprobs(self) -> list[float]:
        """Of the only choice."""
        return self._only.logprobs

    @property
    def finish(self) -> str | None:
        """Of the only choice."""
        return self._only.finish

    @property
    def _only(self) -> Choice:
        assert len(self.choices) == 1, f"{len(self.choices)} choices"
        return self.choices[0]


class Refused(Exception):
    """The service said no. code: gRPC's, also over HTTP. status: HTTP's, or None.

    reason: the machine-readable code of the error. parameter: the field it names, or None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        status: int | None = None,
        reason: str | None = None,
        parameter: str | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.status = status
        self.reason = reason
        self.parameter = parameter


# ---------------------------------------------------------------- HTTP


def strict_json(text: str) -> Any:
    """JSON without NaN and Infinity, which are none."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON: {text[:200]}")

    return json.loads(text, parse_constant=refuse)


@dataclass
class SseStream:
    """A streamed answer as it stands on the wire. events: data of each event with the moment it
    came (monotonic seconds); body: the whole body where there are no events.
    """

    status: int
    content_type: str
    events: list[tuple[float, str]] = field(default_factory=list)
    body: str = ""

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events as JSON, without the closing mark."""
        return [strict_json(data) for _, data in self.events if data != "[DONE]"]

    @property
    def done(self) -> bool:
        """The closing mark came, once and last."""
        return [data for _, data in self.events].count("[DONE]") == 1 and (
            self.events[-1][1] == "[DONE]"
        )


def sse_events(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event; fails on a line that belongs to none."""
    for line in lines:
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
        else:
            assert line == "" or line.startswith(":"), f"a stray line in a stream: {line!r}"


def read_sse(response: httpx.Response) -> SseStream:
    """Reads a streamed response to its end."""
    stream = SseStream(response.status_code, response.headers.get("content-type", ""))
    if not stream.content_type.startswith("text/event-stream"):
        stream.body = response.read().decode()
        return stream
    for data in sse_events(response.iter_lines()):
        stream.events.append((time.monotonic(), data))
    return stream


def http_refusal(status: int, body: str) -> Refused:
    """An error body as an exception; fails if it has not OpenAI's shape."""
    error = strict_json(body)["error"]
    assert {"message", "type", "param", "code"} <= set(error), f"not an error document: {body}"
    return Refused(
        HTTP_CODES[status],
        error["message"],
        status=status,
        reason=error["code"],
        parameter=error["param"],
    )


def answer_of_body(body: dict[str, Any]) -> Answer:
    """The answer in the body of a call that did not stream."""
    return _http_answer([body], [body["usage"]])


def answer_of_stream(stream: SseStream) -> Answer:
    """The answer in a stream that asked for usage; fails unless it ends as it must."""
    chunks = stream.chunks
    failed = [chunk["error"] for chunk in chunks if "error" in chunk]
    if failed:
        raise Refused(grpc.StatusCode.UNKNOWN, failed[0]["message"], reason=failed[0]["code"])
    assert stream.done, f"the stream has no end mark: {stream.events[-1:]}"
    return _http_answer(chunks, [chunk["usage"] for chunk in chunks if chunk.get("usage")])


def _http_answer(parts: list[dict[str, Any]], usages: list[dict[str, Any]]) -> Answer:
    choices: dict[int, Choice] = {}
    prompt_ids: list[int] = []
    for part in parts:
        prompt_ids = prompt_ids or part.get("prompt_token_ids") or []
        for each in part["choices"]:
            prompt_ids = prompt_ids or each.get("prompt_token_ids") or []
            _add_http(choices.setdefault(each["index"], Choice()), each)
    assert len(usages) == 1, f"usage came {len(usages)} times"
    (usage,) = usages
    own = usage["polychip"]
    return Answer(
        choices=[choices[index] for index in sorted(choices)],
        prompt_ids=prompt_ids,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        group=own["group"],
        retractions=own["retractions"],
        failovers=own["failovers"],
        seed=own["seed"],
        raw=parts,
    )


def _add_http(choice: Choice, part: dict[str, Any]) -> None:
    assert choice.finish is None, "a choice went on after its finish reason"
    message = part.get("delta", part.get("message"))
    text = part["text"] if message is None else message.get("content")
    if text:
        choice.deltas.append(text)
    choice.ids.extend(part.get("token_ids") or [])
    scores = part.get("logprobs") or {}
    if message is None:
        choice.logprobs.extend(scores.get("token_logprobs") or [])
    else:
        choice.logprobs.extend(each["logprob"] for each in scores.get("content") or [])
    choice.finish = part["finish_reason"]


# ---------------------------------------------------------------- gRPC


def answer_of_messages(messages: Iterable[inference_pb2.GenerateResponse]) -> Answer:
    """The answer of a gRPC call; fails on a repeated or skipped index. Raises Refused."""
    raw: list[inference_pb2.GenerateResponse] = []
    choices: dict[int, Choice] = {}
    try:
        for message in messages:
            raw.append(message)
            choice = choices.setdefault(message.choice, Choice())
            assert choice.finish is None, "a choice went on after its finish reason"
            if message.token_ids:
                assert message.first_index == len(choice.ids), "an index was repeated or skipped"
            choice.ids.extend(message.token_ids)
            choice.logprobs.extend(message.logprobs)
            if message.text:
                choice.deltas.append(message.text)
            choice.finish = FINISH_NAMES.get(message.finish_reason)
    except grpc.RpcError as error:
        raise grpc_refusal(error) from error
    assert raw, "the stream was empty"
    assert raw[-1].HasField("usage"), "the stream ended without usage"
    usage = raw[-1].usage
    return Answer(
        choices=[choices[index] for index in sorted(choices)],
        prompt_ids=[each for message in raw for each in message.prompt_ids],
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        group=usage.group,
        retractions=usage.retractions,
        failovers=usage.failovers,
        seed=usage.seed,
        raw=raw,
    )


def grpc_refusal(error: grpc.RpcError) -> Refused:
    """A failed call with what its rich status says."""
    reason = parameter = None
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(request):
            parameter = request.field_violations[0].field
    return Refused(error.code(), error.details(), reason=reason, parameter=parameter)
