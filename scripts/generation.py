"""What the client library takes and gives: a generation as asked, and the pieces of its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Message:
    """One message of a conversation; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Generation:
    """What to generate; None, or an empty value, leaves the service's default.

    prompt: text, token ids, or a conversation. n: choices over the one prompt. temperature: 0 takes
    the likeliest token. top_k, top_p, min_p: keep the likeliest tokens only. presence_penalty,
    frequency_penalty, repetition_penalty: against tokens that came before. logit_bias: token id to
    what is added to its logit. seed: of the draws; the service draws one if it is absent. stop: the
    strings, and stop_token_ids: the tokens that end an answer. min_tokens: no end before so many.
    logprobs: log-probability of each token; top_logprobs: also of so many likeliest at its place.
    prompt_logprobs: log-probabilities of the prompt, with so many likeliest at each place.
    priority: higher is served earlier. cache_salt: the prefix cache is shared only between equal
    ones. deadline_s: seconds the whole answer may take, lost connections included.
    """

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    model: str = ""
    request_id: str = ""
    n: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    min_tokens: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class Usage:
    """Counts and facts of a finished answer, all choices together; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    group: str
    failovers: int
    retractions: int
    seed: int


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens at one place, best first, with their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of consecutive tokens of the prompt, the first at index first_index.

    top_tokens: one a token if any were asked for, else empty.
    """

    first_index: int
    logprobs: tuple[float, ...]
    top_tokens: tuple[TopTokens, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A piece of one choice of an answer. first_index: place of token_ids[0] in its output.

    text: whole characters, and nothing that may yet be part of a stop string. logprobs, top_tokens:
    one a token if asked for. prompt_ids: the prompt, in the first pieces. prompt_logprobs: before
    the first token of the choice. finish_reason ("stop" or "length"): in the last piece of each
    choice. usage: in the last piece of all.
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    choice: int = 0
    top_tokens: tuple[TopTokens, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
