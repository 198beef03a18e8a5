"""Fields of a JSON body that are lists or objects: checked by hand, up to the first mistake.

A library that gathers every mistake would build a record for each value of one hostile body. How
many values there are at most is checked before a body is parsed (http_schema), since each step over
a list of them is one call during which no other thread runs.
"""

import math
from collections.abc import Mapping

from control_plane.errors import InvalidRequest
from control_plane.intake.generation_input import Prompt, TextPrompt, TokenPrompt
from control_plane.intake.shown import shown

TOKEN_ID_DIGITS_MAX = 19


def prompts(value: object) -> tuple[Prompt, ...]:
    """Text, texts, token ids or lists of token ids: one prompt or several. InvalidRequest."""
    if value is None:
        raise InvalidRequest("prompt: is missing; send text or token ids", field="prompt")
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list):
        raise _no_prompt()
    kinds = set(map(type, value))
    if kinds <= {int}:
        return (TokenPrompt(tuple(value)),)
    if kinds == {str}:
        return tuple(map(TextPrompt, value))
    if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return tuple(TokenPrompt(tuple(ids)) for ids in value)
    raise _no_prompt()


def stop_strings(value: object) -> tuple[str, ...]:
    """`stop`: one string or a list of them."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise InvalidRequest("stop: must be a string or a list of strings", field="stop")


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A list of token ids; null is none."""
    if value is None:
        return ()
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return tuple(value)
    raise InvalidRequest(f"{name}: must be a list of token ids", field=name)


def logit_bias(value: object) -> dict[int, float]:
    """Biases by token id; in JSON the ids are strings of digits."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(
            "logit_bias: must be an object of token ids and numbers", field="logit_bias"
        )
    return {_bias_id(key): _bias(key, bias) for key, bias in value.items()}


def messages(value: object) -> tuple[Mapping[str, object], ...]:
    """Messages with a role and one text each. Raises InvalidRequest naming the message."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidRequest("messages: must be a list of messages", field="messages")
    return tuple(_message(index, each) for index, each in enumerate(value))


# ---------------------------------------------------------------- parts


def _no_prompt() -> InvalidRequest:
    return InvalidRequest(
        "prompt: must be a string, a list of strings, a list of token ids, or a list of lists of "
        "token ids",
        field="prompt",
    )


def _bias_id(key: str) -> int:
    digits = len(key) <= TOKEN_ID_DIGITS_MAX and key.isascii() and key.isdigit()
    # One spelling for each id, so that no id can be there twice.
    if not digits or (key[0] == "0" and key != "0"):
        raise InvalidRequest(
            f"logit_bias: {shown(key)} is not a token id; send ids of the vocabulary in digits",
            field="logit_bias",
        )
    return int(key)


def _bias(key: str, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, int | float):
        raise InvalidRequest(
            f"logit_bias: the bias of token {shown(key)} must be a number", field="logit_bias"
        )
    try:
        return float(bias)
    except OverflowError:
        return math.inf  # admission says the limits


def _message(index: int, message: object) -> dict[str, object]:
    where = f"messages.{index}"
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where}: must be an object with role and content", field="messages")
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
