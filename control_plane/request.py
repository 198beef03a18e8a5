"""A request as it travels: what the client asked, fixed at admission, in plain values."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are drawn: temperature 0 is greedy; seed and choice key the draws."""

    temperature: float
    seed: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation.

    output_ids: tokens the client already has (resumed); generation continues after them.
    max_tokens: most output tokens, output_ids included; None means what context and memory allow.
    salt, adapter: key the root of the prefix index. use_prefix_cache: False computes everything.
    target_group: only this group may serve it (debugging).
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
    wants_logits: bool = False
    use_prefix_cache: bool = True
    target_group: str | None = None
