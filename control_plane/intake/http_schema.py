"""What HTTP clients send: JSON bodies, checked for shape and turned into a call of the intake.

Limits of values are admission's; fields unknown to every version are ignored, as OpenAI's are many.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from control_plane.errors import InvalidRequest
from control_plane.intake import http_values
from control_plane.intake.generation_input import (
    SHARED_FIELDS,
    ChatPrompt,
    GenerationInput,
    Prompt,
)
from control_plane.intake.reserved_fields import NEUTRAL_VALUES
from control_plane.intake.shown import shortened

PLAIN_FIELDS = {
    **SHARED_FIELDS,
    "model": "model",
    "max_completion_tokens": "max_tokens",
    "ignore_eos": "ignore_eos",
    "priority": "priority",
    "cache_salt": "cache_salt",
}
"""Fields that are taken over as they are, and what intake calls them; the later one counts."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A body that was read: what is wanted, and how the client wants the answer written.

    field_names: what this body calls a field, by the intake's name.
    """

    wanted: GenerationInput
    streamed: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    field_names: Mapping[str, str] = field(default_factory=dict)

    def without_prompts(self) -> "HttpCall":
        """What is needed while the answer comes: prompts may be large."""
        return replace(self, wanted=replace(self.wanted, prompts=()))


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """Fields both endpoints have; null means the default everywhere.

    Lists and objects are `object` here and checked in http_values.
    """

    model_config = ConfigDict(strict=True)
    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: object = None
    seed: int | None = None
    stop: object = None
    stop_token_ids: object = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None


class CompletionBody(GenerationBody):
    """Body of /v1/completions. logprobs: alternatives listed with each token; 0 is none."""

    prompt: object = None
    logprobs: int | None = None
    top_logprobs: int | None = None
    echo: bool | None = None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: object = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None


Body = TypeVar("Body", CompletionBody, ChatBody)


def read_completion(raw: bytes, values_max: int) -> HttpCall:
    """A body of /v1/completions, with at most so many values. Raises InvalidRequest naming the
    field."""
    body, reserved = _read(raw, values_max, CompletionBody)
    if body.top_logprobs:
        raise InvalidRequest(
            "top_logprobs: is a field of conversations; send the number as logprobs",
            field="top_logprobs",
        )
    wanted = _generation_input(
        body,
        http_values.prompts(body.prompt),
        reserved,
        logprobs=body.logprobs is not None,
        top_tokens=body.logprobs,
        echo=bool(body.echo),
    )
    return _call(body, wanted, {"top_logprobs": "logprobs"})


def read_chat(raw: bytes, values_max: int) -> HttpCall:
    """A body of /v1/chat/completions. Raises likewise."""
    body, reserved = _read(raw, values_max, ChatBody)
    if body.echo:
        raise InvalidRequest(
            "echo: is a field of /v1/completions; leave it out for a conversation", field="echo"
        )
    wanted = _generation_input(
        body,
        (ChatPrompt(http_values.messages(body.messages)),),
        reserved,
        logprobs=bool(body.logprobs),
        top_tokens=body.top_logprobs,
    )
    return _call(body, wanted, {})


# ---------------------------------------------------------------- parts


def _read(raw: bytes, values_max: int, kind: type[Body]) -> tuple[Body, dict[str, object]]:
    """The body and the reserved fields in it."""
    values = _json_object(raw, values_max)
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = shortened(".".join(map(str, first["loc"])))
        raise InvalidRequest(
            f"{name}: {first['msg']}; send it so or leave it out", field=str(first["loc"][0])
        ) from error
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs: cannot be streamed; leave out stream, or send echo and logprobs to "
            "/v1/completions",
            field="prompt_logprobs",
        )
    return body, {name: values[name] for name in NEUTRAL_VALUES if values.get(name) is not None}


def _generation_input(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    reserved: dict[str, object],
    *,
    logprobs: bool,
    top_tokens: int | None,
    echo: bool = False,
) -> GenerationInput:
    present: dict[str, Any] = {
        known_as: value
        for name, known_as in PLAIN_FIELDS.items()
        if (value := getattr(body, name)) is not None
    }
    return GenerationInput(
        prompts=prompts,
        logit_bias=http_values.logit_bias(body.logit_bias),
        stop=http_values.stop_strings(body.stop),
        stop_token_ids=http_values.token_ids("stop_token_ids", body.stop_token_ids),
        logprobs=logprobs,
        top_tokens=top_tokens,
        echo=echo,
        reserved=reserved,
        **present,
    )


def _call(body: GenerationBody, wanted: GenerationInput, field_names: dict[str, str]) -> HttpCall:
    options = body.stream_options
    if body.max_completion_tokens is not None:
        field_names = field_names | {"max_tokens": "max_completion_tokens"}
    return HttpCall(
        wanted,
        streamed=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        field_names=field_names,
    )


def _json_object(raw: bytes, values_max: int) -> dict[str, object]:
    _check_values(raw, values_max)
    try:
        # NaN and Infinity, no JSON but what Python clients send, are refused by the field's check.
        values = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"body: not UTF-8 ({error.reason})", field="body") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"body: not valid JSON: {error}", field="body") from error
    if not isinstance(values, dict):
        raise InvalidRequest(
            f"body: must be a JSON object, not {type(values).__name__}", field="body"
        )
    return values


def _check_values(raw: bytes, values_max: int) -> None:
    """Parsing is one call of the library, during which no other thread runs: not even the event
    loop's. Its time is that of the values, of which there are at most as many as signs around them.
    """
    # Names of an object count too: they take longest. In texts there are few such signs.
    count = sum(map(raw.count, (b",", b":", b"[", b"{")))
    if count > values_max:
        raise InvalidRequest(
            f"body: {count} commas, colons and opening brackets are more than {values_max} "
            "(--max-json-values); send a shorter prompt or shorter lists",
            field="body",
        )
