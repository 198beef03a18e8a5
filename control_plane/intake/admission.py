"""Checks what a client asks, whatever protocol it came by, and fixes it as records for the core.

servers --GenerationInput--> Admission.admit --Admitted--> Generation
"""

from dataclasses import dataclass, replace
from random import Random

from control_plane.config import ControlPlaneConfig
from control_plane.errors import InvalidRequest
from control_plane.intake.admitted import Admitted, AdmittedChoice, Ends
from control_plane.intake.call_limits import CallLimits
from control_plane.intake.field_checks import FieldChecks, field_of, short
from control_plane.intake.generation_input import GenerationInput
from control_plane.intake.model_card import ModelCard
from control_plane.intake.prompt_reader import PromptReader, label_of
from control_plane.intake.reserved_fields import refuse_reserved
from control_plane.intake.stop_matcher import StopStrings
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.tokenizer_pool import TokenizerPool
from control_plane.request import Request, Sampling

SEED_DRAWN_BITS = 53
"""A drawn seed goes back to the client as a JSON number, which is exact up to here."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A call whose fields are checked, before its prompts are tokens."""

    request_id: str
    wanted: GenerationInput
    choices_count: int
    sampling: Sampling
    stop_ids: frozenset[int]
    stop_strings: StopStrings
    prompt_top_tokens: int | None


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    """A prompt as tokens; text: for an echo. output_tokens_max: of each answer to it."""

    token_ids: tuple[int, ...]
    text: str | None
    output_tokens_max: int


class Admission:
    """Every error is a RequestError that names the field, the limit and the remedy."""

    def __init__(
        self,
        config: ControlPlaneConfig,
        card: ModelCard,
        tokenizer: Tokenizer,
        pool: TokenizerPool,
        random: Random,
    ) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._random = random
        self._checks = FieldChecks(config, card.vocabulary_size)
        self._limits = CallLimits(config)
        self._reader = PromptReader(card, tokenizer, pool)

    async def admit(self, request_id: str, wanted: GenerationInput) -> Admitted:
        """Checks the cheap fields, tokenizes in the pool, checks the lengths."""
        plan = self._plan(request_id, wanted)
        self._reader.check(wanted.prompts)
        self._check_resumed(wanted, self._card.context_tokens)
        await self._reader.check_lists("resume_output_ids", wanted.resume_output_ids)
        prompts = await self._read(plan)
        choices = tuple(
            _choice(plan, prompt, prompt_index, choice)
            for prompt_index, prompt in enumerate(prompts)
            for choice in range(plan.choices_count)
        )
        field = field_of(label_of(wanted.prompts, 0))
        self._limits.check_queue(field, [choice.request for choice in choices])
        return Admitted(request_id=request_id, seed=plan.sampling.seed, choices=choices)

    # ---------------------------------------------------------------- fields

    def _plan(self, request_id: str, wanted: GenerationInput) -> _Plan:
        if wanted.model:
            self._card.check_name(wanted.model)
        checks = self._checks
        choices_count = self._limits.choices_count(wanted)
        refuse_reserved(wanted.reserved, choices_count)
        checks.check_lengths(wanted)
        checks.check_scheduling(wanted)
        checks.check_stops(wanted)
        stop_ids = self._stop_ids(wanted)
        seed = checks.seed(wanted.seed)
        if seed is None:
            seed = self._random.getrandbits(SEED_DRAWN_BITS)
        return _Plan(
            request_id=request_id,
            wanted=wanted,
            choices_count=choices_count,
            sampling=checks.sampling(wanted, seed, stop_ids),
            stop_ids=stop_ids,
            stop_strings=StopStrings(wanted.stop),
            prompt_top_tokens=checks.prompt_top_tokens(wanted),
        )

    def _stop_ids(self, wanted: GenerationInput) -> frozenset[int]:
        """A special token gives no text: one that is named as a stop string ends by its id."""
        special_ids = map(self._tokenizer.special_id, wanted.stop)
        size = self._card.vocabulary_size
        known_ids = (each for each in special_ids if each is not None and each < size)
        stop_ids = {*wanted.stop_token_ids, *known_ids}
        return frozenset(stop_ids if wanted.ignore_eos else {*stop_ids, *self._card.end_token_ids})

    # ---------------------------------------------------------------- prompts and lengths

    async def _read(self, plan: _Plan) -> list[_ReadPrompt]:
        wanted = plan.wanted
        prompts_ids = await self._reader.read(wanted.prompts)
        if plan.prompt_top_tokens is not None:
            tokens_count = sum(map(len, prompts_ids))
            self._limits.check_scores(wanted, tokens_count, plan.prompt_top_tokens)
        limits = [self._output_tokens_max(wanted, len(token_ids)) for token_ids in prompts_ids]
        texts: list[str | None] = [None] * len(prompts_ids)
        if wanted.echo:
            texts = [*await self._reader.texts(wanted.prompts, prompts_ids)]
        return list(map(_ReadPrompt, prompts_ids, texts, limits))

    def _output_tokens_max(self, wanted: GenerationInput, prompt_tokens: int) -> int:
        """Most output tokens; the limit of memory is the core's to add."""
        context_tokens = self._card.context_tokens
        output_tokens_max = context_tokens - prompt_tokens
        if wanted.max_tokens is not None:
            if wanted.max_tokens > output_tokens_max:
                raise InvalidRequest(
                    f"max_tokens: {prompt_tokens} prompt tokens and {short(wanted.max_tokens)} "
                    f"output tokens exceed the context of {context_tokens} tokens; send at most "
                    f"{output_tokens_max} or a shorter prompt",
                    field="max_tokens",
                )
            output_tokens_max = wanted.max_tokens
        self._check_resumed(wanted, output_tokens_max)
        return output_tokens_max

    def _check_resumed(self, wanted: GenerationInput, output_tokens_max: int) -> None:
        longest = max(map(len, wanted.resume_output_ids), default=0)
        if longest > output_tokens_max:
            raise InvalidRequest(
                f"resume_output_ids: {longest} tokens are more than the {output_tokens_max} this "
                "answer may have; send those that were received",
                field="resume_output_ids",
            )


def _choice(plan: _Plan, prompt: _ReadPrompt, prompt_index: int, choice: int) -> AdmittedChoice:
    wanted = plan.wanted
    index = prompt_index * plan.choices_count + choice
    alone = len(wanted.prompts) * plan.choices_count == 1
    resumed = wanted.resume_output_ids
    # A higher one would only have to be carried: the answer ends by its length before.
    min_tokens = min(plan.sampling.min_tokens, prompt.output_tokens_max)
    # One choice scores the prompt for all: the scores are the same, and so is the work.
    prompt_top_tokens = None if choice else plan.prompt_top_tokens
    request = Request(
        request_id=plan.request_id if alone else f"{plan.request_id}/{index}",
        prompt_ids=prompt.token_ids,
        sampling=replace(plan.sampling, choice=choice, min_tokens=min_tokens),
        max_tokens=wanted.max_tokens,
        output_ids=resumed[index] if index < len(resumed) else (),
        priority=wanted.priority or 0,
        deadline=wanted.deadline,
        salt=wanted.cache_salt,
        wants_logprobs=wanted.logprobs,
        top_tokens=wanted.top_tokens or 0,
        prompt_top_tokens=prompt_top_tokens,
        wants_logits=wanted.wants_logits,
        use_prefix_cache=prompt_top_tokens is None,
        target_group=wanted.target_group,
    )
    return AdmittedChoice(
        index=index,
        prompt_index=prompt_index,
        request=request,
        ends=Ends(plan.stop_ids, plan.stop_strings, min_tokens, prompt.output_tokens_max),
        prompt_text=prompt.text,
    )
