"""A request as it travels: what the client asked, fixed at admission, in plain values."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are drawn: temperature 0 is greedy; seed and choice key the draws.

    The order is bias, penalties, suppression, temperature, top_k, top_p, min_p; every default
    changes nothing. top_k: 0 keeps all. logit_bias: (token id, bias), ascending. suppressed_ids:
    may not be drawn below the output index min_tokens.
    """

    temperature: float
    seed: int
    choice: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation.

    output_ids: tokens the client already has (resumed); generation continues after them.
    max_tokens: most output tokens, output_ids included; None means what context and memory allow.
    salt, adapter: key the root of the prefix index. use_prefix_cache: False computes everything.
    target_group: only this group may serve it (debugging). top_tokens: likeliest tokens listed with
    each drawn one. prompt_top_tokens: None if the prompt is not scored, else likeliest tokens
    listed with each of its log-probabilities; such a request has use_prefix_cache False.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None = None
    output_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline: float | None = None
    model: str = "default"
    adapter: int = 0
    salt: str = ""
    wants_logprobs: bool = False
    top_tokens: int = 0
    prompt_top_tokens: int | None = None
    wants_logits: bool = False
    use_prefix_cache: bool = True
    target_group: str | None = None
