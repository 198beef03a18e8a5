"""What HTTP clients send: JSON bodies, checked for shape and turned into a call of the intake.

Limits of values are admission's; fields unknown to every version are ignored, as OpenAI's are many.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from control_plane.errors import InvalidRequest
from control_plane.intake import http_values
from control_plane.intake.generation_input import ChatPrompt, GenerationInput, Prompt
from control_plane.intake.reserved_fields import NEUTRAL_VALUES

SHOWN_CHARACTERS_MAX = 80


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """How the client wants its answer written.

    model_name: as the client called it, or "". top_logprobs: alternatives listed with each token.
    prompt_logprobs: None if they were not asked for.
    """

    model_name: str = ""
    streamed: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A body that was read. field_names: what this body calls a field, by the intake's name."""

    wanted: GenerationInput
    shape: AnswerShape
    field_names: Mapping[str, str] = field(default_factory=dict)


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


def read_completion(raw: bytes, choices_max: int) -> HttpCall:
    """A body of /v1/completions. Raises InvalidRequest naming the field."""
    body, reserved = _read(raw, CompletionBody)
    if body.top_logprobs:
        raise InvalidRequest(
            "top_logprobs: is a field of conversations; send the number as logprobs",
            field="top_logprobs",
        )
    wanted = _generation_input(
        body,
        http_values.prompts(body.prompt, choices_max),
        reserved,
        logprobs=body.logprobs is not None,
        top_tokens=body.logprobs,
        echo=bool(body.echo),
    )
    return HttpCall(wanted, _shape(body, wanted), _field_names(body) | {"top_logprobs": "logprobs"})


def read_chat(raw: bytes, choices_max: int) -> HttpCall:
    """A body of /v1/chat/completions; `choices_max` is for one with prompts. Raises likewise."""
    del choices_max
    body, reserved = _read(raw, ChatBody)
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
    return HttpCall(wanted, _shape(body, wanted), _field_names(body))


# ---------------------------------------------------------------- parts


def _read(raw: bytes, kind: type[Body]) -> tuple[Body, dict[str, object]]:
    """The body and the reserved fields in it."""
    values = _json_object(raw)
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))[:SHOWN_CHARACTERS_MAX]
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
    newer = body.max_completion_tokens
    return GenerationInput(
        prompts=prompts,
        model=body.model or "",
        n=body.n,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=http_values.logit_bias(body.logit_bias),
        seed=body.seed,
        stop=http_values.stop_strings(body.stop),
        stop_token_ids=http_values.token_ids("stop_token_ids", body.stop_token_ids),
        min_tokens=body.min_tokens,
        max_tokens=body.max_tokens if newer is None else newer,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        top_tokens=top_tokens,
        prompt_top_tokens=body.prompt_logprobs,
        echo=echo,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        reserved=reserved,
    )


def _shape(body: GenerationBody, wanted: GenerationInput) -> AnswerShape:
    options = body.stream_options
    return AnswerShape(
        model_name=wanted.model,
        streamed=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        logprobs=wanted.logprobs,
        top_logprobs=wanted.top_tokens or 0,
        prompt_logprobs=body.prompt_logprobs,
        echo=wanted.echo,
    )


def _field_names(body: GenerationBody) -> dict[str, str]:
    return {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}


def _json_object(raw: bytes) -> dict[str, object]:
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
