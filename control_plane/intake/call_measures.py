"""What is counted and measured of one call: for the metrics, and for the usage its client gets.

Generation --what came, when it ended--> CallMeasures --> Metrics, Usage
"""

from collections.abc import Callable, Sequence

from control_plane.intake.answer import Answer
from control_plane.intake.answer_piece import Usage
from control_plane.metrics import Metrics


class CallMeasures:
    """Made as the call arrives. clock: the core's, in seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float], protocol: str) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = clock()
        self._answers: Sequence[Answer] = ()
        self._of_prompts: tuple[Answer, ...] = ()
        self._prompts_due: set[int] = set()
        """Choices whose prompt is to be counted once something of them came."""
        self._tokens_at: dict[int, float] = {}
        """When the latest tokens of a choice came."""
        self._group_id = ""
        metrics.request_received(protocol)

    def submits(self, answers: Sequence[Answer]) -> None:
        """All its choices, before the first of them is submitted."""
        self._answers = answers
        self._of_prompts = _one_a_prompt(answers)
        self._prompts_due = {each.choice.index for each in self._of_prompts if each.submission}

    def heard(self, answer: Answer, tokens_count: int) -> None:
        """So many tokens of a choice came; 0 if none of them is part of the answer."""
        self._group_id = answer.facts.group_id
        if not tokens_count:
            return
        now, index = self._clock(), answer.choice.index
        if not self._tokens_at:
            self._metrics.queue_time(answer.facts.queue_s)
            self._metrics.first_token(now - self._arrived_at)
        if index in self._tokens_at:
            self._metrics.inter_token(now - self._tokens_at[index], tokens_count)
        self._tokens_at[index] = now
        self._metrics.generation_tokens(tokens_count)
        self.count_prompt(answer)

    def count_prompt(self, answer: Answer) -> None:
        """Something of a choice was computed; its prompt counts once, and with the choice that
        stands for it in the usage."""
        if answer.choice.index in self._prompts_due:
            self._prompts_due.remove(answer.choice.index)
            self._metrics.prompt_tokens(
                len(answer.choice.request.prompt_ids), answer.facts.cached_tokens
            )

    def finished(self, reason: str) -> None:
        """The call is over."""
        self._metrics.request_finished(reason, self._clock() - self._arrived_at)

    def usage(self, seed: int) -> Usage:
        """Of the whole call."""
        return Usage(
            prompt_tokens=sum(len(each.choice.request.prompt_ids) for each in self._of_prompts),
            completion_tokens=sum(each.count for each in self._answers),
            cached_tokens=sum(each.facts.cached_tokens for each in self._of_prompts),
            group_id=self._group_id,
            failovers=sum(each.facts.failovers for each in self._answers),
            retractions=sum(each.facts.retractions for each in self._answers),
            seed=seed,
        )


def _one_a_prompt(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """The choice that stands for each prompt: its first that is computed, else its first."""
    first: dict[int, Answer] = {}
    for computed in (True, False):
        for answer in answers:
            if (answer.submission is not None) == computed:
                first.setdefault(answer.choice.prompt_index, answer)
    return tuple(first.values())
