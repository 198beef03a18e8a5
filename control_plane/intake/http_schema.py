"""What HTTP clients send: JSON bodies, checked for shape and turned into GenerationInput.

Limits of values are admission's; fields unknown to every version are ignored, as OpenAI's are many.
"""

import json
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from control_plane.errors import InvalidRequest
from control_plane.intake.admission import ChatPrompt, GenerationInput, TextPrompt, TokenPrompt
from control_plane.intake.reserved_fields import NEUTRAL_VALUES


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """Fields both endpoints have; null means the default everywhere."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def wants_usage_chunk(self) -> bool:
        """A streamed answer ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """Body of /v1/completions; prompt: text or token ids."""

    prompt: object = None
    logprobs: int | None = None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions; messages: objects with role and content."""

    messages: list[dict[str, object]] | None = None
    logprobs: bool | None = None


Body = TypeVar("Body", CompletionBody, ChatBody)


def read_body(raw: bytes, kind: type[Body]) -> tuple[Body, dict[str, object]]:
    """The body and the reserved fields in it. Raises InvalidRequest naming the field."""
    values = _json_object(raw)
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "body"
        raise InvalidRequest(
            f"{name}: {first['msg']}; send it so or leave it out", field=name
        ) from error
    # `logprobs` means other things to the two endpoints and is not reserved.
    return body, {name: values[name] for name in NEUTRAL_VALUES if name in values}


def completion_input(
    body: CompletionBody, reserved: dict[str, object], request_id: str
) -> GenerationInput:
    """A completion as admission takes it."""
    if body.logprobs is not None and body.logprobs not in (0, 1):
        raise InvalidRequest(
            f"logprobs: {body.logprobs} is not supported yet; send 0 or 1 for the log-probability "
            "of each drawn token",
            field="logprobs",
        )
    return _generation_input(
        body, _prompt(body.prompt), reserved, request_id, logprobs=body.logprobs is not None
    )


def chat_input(body: ChatBody, reserved: dict[str, object], request_id: str) -> GenerationInput:
    """A conversation as admission takes it."""
    messages = tuple(_message(index, each) for index, each in enumerate(body.messages or ()))
    return _generation_input(
        body, ChatPrompt(messages), reserved, request_id, logprobs=bool(body.logprobs)
    )


def _generation_input(
    body: GenerationBody,
    prompt: TextPrompt | TokenPrompt | ChatPrompt | None,
    reserved: dict[str, object],
    request_id: str,
    *,
    logprobs: bool,
) -> GenerationInput:
    max_tokens = body.max_completion_tokens
    return GenerationInput(
        prompt=prompt,
        request_id=request_id,
        model=body.model or "",
        temperature=body.temperature,
        seed=body.seed,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        reserved=reserved,
    )


# ---------------------------------------------------------------- parts


def _prompt(prompt: object) -> TextPrompt | TokenPrompt | None:
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))
        if kinds <= {int}:
            return TokenPrompt(tuple(prompt))
        if kinds <= {str, list}:
            raise InvalidRequest(
                "prompt: several prompts in one request are not supported yet; send one request "
                "for each",
                field="prompt",
            )
    raise InvalidRequest("prompt: must be a string or a list of token ids", field="prompt")


def _message(index: int, message: dict[str, object]) -> dict[str, object]:
    where = f"messages.{index}"
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role: must be a string such as 'user'", field="messages")
    if message.get("tool_calls"):
        raise InvalidRequest(
            f"{where}.tool_calls: not supported yet; leave it out", field="messages"
        )
    return {"role": role, "content": _content(where, message.get("content"))}


def _content(where: str, content: object) -> str:
    """Text as it is; a list of text parts joined, as OpenAI allows."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content: must be a string", field="messages")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f"{where}.content: only parts of type 'text' are supported", field="messages"
            )
        texts.append(text)
    return "".join(texts)


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
