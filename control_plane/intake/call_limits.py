"""How much one call may ask in all, over its prompts and choices; the same for both protocols."""

from collections.abc import Sequence

from control_plane.config import ControlPlaneConfig
from control_plane.errors import InvalidRequest
from control_plane.intake.field_checks import outside, short
from control_plane.intake.generation_input import GenerationInput
from control_plane.request import Request

CHOICES_ALLOWED = "that one request may have here (--max-choices, --max-queue)"


class CallLimits:
    """Every method raises InvalidRequest naming the field, the limit and the remedy."""

    def __init__(self, config: ControlPlaneConfig) -> None:
        self._choices_max = config.call_choices_max
        self._prompt_scores_max = config.prompt_scores_max
        self._queue_tokens_max = config.scheduling.queue_tokens_max

    def choices_count(self, wanted: GenerationInput) -> int:
        """Choices of each prompt."""
        count = 1 if wanted.n is None else wanted.n
        if count < 1:
            raise outside("n", count, "at least 1", "leave it out for one choice")
        prompts_count, choices_max = max(1, len(wanted.prompts)), self._choices_max
        if prompts_count > choices_max:
            raise InvalidRequest(
                f"prompt: {prompts_count} prompts are more than the {choices_max} "
                f"{CHOICES_ALLOWED}; send fewer",
                field="prompt",
            )
        if prompts_count * count > choices_max:
            raise InvalidRequest(
                f"n: {short(count)} choices of {prompts_count} prompts are more than the "
                f"{choices_max} {CHOICES_ALLOWED}; send at most {choices_max // prompts_count}",
                field="n",
            )
        if len(wanted.resume_output_ids) > prompts_count * count:
            raise InvalidRequest(
                f"resume_output_ids: {len(wanted.resume_output_ids)} lists are more than the "
                f"{prompts_count * count} choices; send one for each choice, in their order",
                field="resume_output_ids",
            )
        return count

    def check_scores(self, wanted: GenerationInput, tokens_count: int, tops_count: int) -> None:
        """Scores of the prompts: `tokens_count` in all, each with `tops_count` likeliest tokens."""
        if tokens_count * (1 + tops_count) <= self._prompt_scores_max:
            return
        name = "logprobs" if wanted.prompt_top_tokens is None else "prompt_logprobs"
        raise InvalidRequest(
            f"{name}: {tokens_count} prompt tokens with {1 + tops_count} log-probabilities each "
            f"are more than the {self._prompt_scores_max} that one request may have "
            "(--max-prompt-scores); send fewer or shorter prompts, or ask for fewer likeliest "
            "tokens",
            field=name,
        )

    def check_queue(self, field: str, requests: Sequence[Request]) -> None:
        """A call that would not fit an empty queue; to try again would never help it.

        field: what the client calls the prompt.
        """
        computed = [
            len(each.prompt_ids) + len(each.output_ids)
            for each in requests
            if each.max_tokens != 0 or each.prompt_top_tokens is not None
        ]
        if sum(computed) > self._queue_tokens_max:
            raise InvalidRequest(
                f"{field}: {sum(computed)} tokens in {len(computed)} choices are more than the "
                f"{self._queue_tokens_max} that may wait (--max-queue-tokens); send fewer or "
                "shorter prompts, or a lower n",
                field=field,
            )
