"""Checks what a client asks, whatever protocol it came by, and fixes it as a Request.

servers --GenerationInput--> Admission.admit --Admitted--> AnswerBook
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from uuid import uuid4

from control_plane.errors import InvalidRequest, ModelNotFound
from control_plane.intake.model_card import ModelCard
from control_plane.intake.reserved_fields import refuse_reserved
from control_plane.intake.tokenizer_pool import TokenizerPool
from control_plane.request import Request, Sampling

TEMPERATURE_DEFAULT = 1.0
TEMPERATURE_MAX = 100.0
TEMPERATURE_GREEDY_BELOW = 1e-5
"""Dividing by less overflows float32; the choice is the greedy one anyway."""
SEED_MAX = (1 << 64) - 1
SEED_DRAWN_BITS = 53
"""A drawn seed goes back to the client as a JSON number, which is exact up to here."""
STOP_TOKEN_IDS_MAX = 64
REQUEST_ID_CHARACTERS_MAX = 128


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


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """What a client asks, not checked yet; None where it said nothing.

    prompt: None if the client sent none. resume_output_ids: output the client already has.
    deadline: in the core's clock. reserved: values of fields that later versions will honour.
    """

    prompt: TextPrompt | TokenPrompt | ChatPrompt | None
    request_id: str = ""
    model: str = ""
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    resume_output_ids: tuple[int, ...] = ()
    deadline: float | None = None
    reserved: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked request with what ends its answer: one of `stop_ids`, or `output_tokens_max`."""

    request: Request
    stop_ids: frozenset[int]
    output_tokens_max: int


class Admission:
    """Every error is a RequestError that names the field, the limit and the remedy."""

    def __init__(self, card: ModelCard, pool: TokenizerPool, random: Random) -> None:
        self._card = card
        self._pool = pool
        self._random = random

    async def admit(self, wanted: GenerationInput) -> Admitted:
        """Checks the cheap fields, tokenizes in the pool, checks the lengths."""
        self._check_model(wanted.model)
        refuse_reserved(wanted.reserved)
        _check_request_id(wanted.request_id)
        sampling = self._sampling(wanted)
        if wanted.max_tokens is not None and wanted.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens: {wanted.max_tokens} is below 1; leave it out for as many as fit",
                field="max_tokens",
            )
        self._check_stop_token_ids(wanted.stop_token_ids)
        self._check_ids("resume_output_ids", wanted.resume_output_ids)
        prompt_ids = await self._prompt_ids(wanted.prompt)
        return Admitted(
            request=Request(
                request_id=wanted.request_id or uuid4().hex,
                prompt_ids=prompt_ids,
                sampling=sampling,
                max_tokens=wanted.max_tokens,
                output_ids=wanted.resume_output_ids,
                deadline=wanted.deadline,
                wants_logprobs=wanted.logprobs,
            ),
            stop_ids=frozenset(wanted.stop_token_ids)
            | frozenset(() if wanted.ignore_eos else self._card.end_token_ids),
            output_tokens_max=self._output_tokens_max(wanted, len(prompt_ids)),
        )

    # ---------------------------------------------------------------- fields

    def _check_model(self, name: str) -> None:
        if name and name not in self._card.names:
            raise ModelNotFound(
                f"model: {name[:80]!r} is not served here; send one of "
                f"{', '.join(map(repr, self._card.names))} or leave it out",
                field="model",
            )

    def _sampling(self, wanted: GenerationInput) -> Sampling:
        temperature = (
            TEMPERATURE_DEFAULT if wanted.temperature is None else float(wanted.temperature)
        )
        if not (math.isfinite(temperature) and 0 <= temperature <= TEMPERATURE_MAX):
            raise InvalidRequest(
                f"temperature: {temperature} is not between 0 and {TEMPERATURE_MAX:g}; send 0 for "
                "the likeliest token, 1 for the model's own distribution",
                field="temperature",
            )
        seed = wanted.seed
        if seed is None:
            seed = self._random.getrandbits(SEED_DRAWN_BITS)
        elif not 0 <= seed <= SEED_MAX:
            raise InvalidRequest(
                f"seed: {_short(seed)} is not between 0 and {SEED_MAX}; leave it out for a random "
                "one",
                field="seed",
            )
        greedy = temperature < TEMPERATURE_GREEDY_BELOW
        return Sampling(temperature=0.0 if greedy else temperature, seed=seed)

    def _check_stop_token_ids(self, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) > STOP_TOKEN_IDS_MAX:
            raise InvalidRequest(
                f"stop_token_ids: {len(token_ids)} ids are more than {STOP_TOKEN_IDS_MAX}; send "
                "fewer",
                field="stop_token_ids",
            )
        self._check_ids("stop_token_ids", token_ids)

    def _check_ids(self, name: str, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            return
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._card.vocabulary_size:
                raise InvalidRequest(
                    f"{name}: token id {_short(token_id)} is outside the vocabulary; ids go from 0 "
                    f"to {self._card.vocabulary_size - 1}",
                    field=name,
                )

    # ---------------------------------------------------------------- prompt and lengths

    async def _prompt_ids(
        self, prompt: TextPrompt | TokenPrompt | ChatPrompt | None
    ) -> tuple[int, ...]:
        match prompt:
            case TextPrompt(text=text) if text:
                return await self._pool.encode(text)
            case TokenPrompt(token_ids=token_ids) if token_ids:
                self._check_ids("prompt", token_ids)
                return token_ids
            case ChatPrompt(messages=messages) if messages:
                token_ids = await self._pool.encode_chat(messages)
                if token_ids:
                    return token_ids
        name = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        problem = "is missing" if prompt is None else "is empty"
        raise InvalidRequest(f"{name}: {problem}; send at least one token of input", field=name)

    def _output_tokens_max(self, wanted: GenerationInput, prompt_tokens: int) -> int:
        """Most output tokens; the limit of memory is the core's to add."""
        context_tokens = self._card.context_tokens
        name = "messages" if isinstance(wanted.prompt, ChatPrompt) else "prompt"
        if prompt_tokens >= context_tokens:
            raise InvalidRequest(
                f"{name}: {prompt_tokens} tokens leave no room for output in the context of "
                f"{context_tokens} tokens; send at most {context_tokens - 1}",
                field=name,
            )
        output_tokens_max = context_tokens - prompt_tokens
        if wanted.max_tokens is not None:
            if wanted.max_tokens > output_tokens_max:
                raise InvalidRequest(
                    f"max_tokens: {prompt_tokens} prompt tokens and {_short(wanted.max_tokens)} "
                    f"output tokens exceed the context of {context_tokens} tokens; send at most "
                    f"{output_tokens_max} or a shorter prompt",
                    field="max_tokens",
                )
            output_tokens_max = wanted.max_tokens
        if len(wanted.resume_output_ids) > output_tokens_max:
            raise InvalidRequest(
                f"resume_output_ids: {len(wanted.resume_output_ids)} tokens are more than the "
                f"{output_tokens_max} this answer may have; send those that were received",
                field="resume_output_ids",
            )
        return output_tokens_max


def _check_request_id(request_id: str) -> None:
    if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequest(
            f"request_id: {len(request_id)} characters are more than {REQUEST_ID_CHARACTERS_MAX}; "
            "send a shorter one or none",
            field="request_id",
        )
    if not request_id.isprintable():
        raise InvalidRequest(
            f"request_id: {request_id!a} holds characters that cannot be printed; send letters, "
            "digits and signs, or none",
            field="request_id",
        )


def _short(number: int) -> str:
    """A number for people; one of thousands of digits only by its size."""
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"a number of {bits} bits"
