"""What a client asks, as both protocols hand it to admission; nothing in it is checked yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SHARED_FIELDS = {
    "n": "n",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "min_tokens": "min_tokens",
    "max_tokens": "max_tokens",
    "prompt_logprobs": "prompt_top_tokens",
}
"""Fields both protocols have under one name and hand over as they are, and their name here."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue; the model's start token is put first unless the text begins with it."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, for the model's template."""

    messages: tuple[Mapping[str, object], ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One call of a client; None where it said nothing.

    prompts: one, or several of a completion; each has n choices. logit_bias: by token id.
    prompt_top_tokens: the prompt is scored, with so many alternatives at each place. echo: the
    prompt comes before the answer, with its log-probabilities if logprobs are asked for.
    resume_output_ids: for each choice, the output the client already has. deadline: in the core's
    clock. wants_logits, target_group: for debugging; the group that must serve it. reserved: values
    of fields that later versions will honour.
    """

    prompts: tuple[Prompt, ...]
    model: str = ""
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_tokens: int | None = None
    prompt_top_tokens: int | None = None
    echo: bool = False
    resume_output_ids: tuple[tuple[int, ...], ...] = ()
    priority: int | None = None
    cache_salt: str = ""
    deadline: float | None = None
    wants_logits: bool = False
    target_group: str | None = None
    reserved: Mapping[str, object] = field(default_factory=dict)
