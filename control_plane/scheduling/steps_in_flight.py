"""The steps of a group on their way: what their results must look like, when the last one ends."""

from collections import deque
from dataclasses import dataclass

from control_plane.scheduling.messages import PromptScores, RowResult, TopTokens
from control_plane.scheduling.step_planner import PlannedRow
from control_plane.scheduling.step_time import StepTimeModel


@dataclass(slots=True)
class StepInFlight:
    """A step that was sent; started_at is when the chips began it, as far as we can tell."""

    step_id: int
    rows: list[PlannedRow]
    chunk_tokens: int
    context_tokens: int
    started_at: float


class StepsInFlight:
    """In the order they were sent, which is the order they run in."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._step_time = step_time

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def started_at(self) -> float:
        """When the oldest began: as it was sent, or as the one before it ended."""
        return self._steps[0].started_at

    def add(self, step_id: int, rows: list[PlannedRow], now: float) -> None:
        """A step is sent; its rows are already counted as planned."""
        chunk_tokens = sum(row.tokens_count for row in rows if row.is_prefill)
        context_tokens = sum(row.placement.planned_count for row in rows)
        self._steps.append(StepInFlight(step_id, rows, chunk_tokens, context_tokens, now))

    def forgive(self, stall_s: float) -> None:
        """The control plane itself stood still so long: no step took that time."""
        for step in self._steps:
            step.started_at += stall_s

    def plan_at(self, lead_s: float) -> float | None:
        """`lead_s` before the last one ends, as far as expected; None if none is or is known."""
        if not self._steps or not self._step_time.is_known:
            return None
        expected_end = self._steps[0].started_at
        for step in self._steps:
            expected_end += self._step_time.predict(
                len(step.rows), step.chunk_tokens, step.context_tokens
            )
        return expected_end - lead_s - self._step_time.margin_s

    def expects(
        self, step_id: int, results: tuple[RowResult, ...], prompt_scores: tuple[PromptScores, ...]
    ) -> bool:
        """Whether these are the results of the oldest step: one token for each row that draws, one
        score for each prompt token that is to be scored, each with what its request asked for."""
        if not self._steps or self._steps[0].step_id != step_id:
            return False
        sampled = [row for row in self._steps[0].rows if row.sampled]
        scoring = [row for row in self._steps[0].rows if row.scores_count is not None]
        if len(results) != len(sampled) or len(prompt_scores) != len(scoring):
            return False
        return all(map(_fits, sampled, results)) and all(map(_scores_fit, scoring, prompt_scores))

    def take(self, now: float) -> StepInFlight:
        """The oldest step ended; the next one begins."""
        step = self._steps.popleft()
        seconds = now - step.started_at
        self._step_time.observe(len(step.rows), step.chunk_tokens, step.context_tokens, seconds)
        if self._steps:
            self._steps[0].started_at = now
        return step


def _fits(row: PlannedRow, result: RowResult) -> bool:
    """Whether a row drew one token and tells of it what was asked; a failed one tells nothing."""
    request = row.live.request
    if not result.finite:
        return True
    # A log-probability nobody asked for does no harm.
    lacks_logprob = request.wants_logprobs and not result.logprobs
    if len(result.token_ids) != 1 or len(result.logprobs) > 1 or lacks_logprob:
        return False
    return _tops_fit(result.tops, 1, request.top_tokens)


def _scores_fit(row: PlannedRow, scores: PromptScores) -> bool:
    if len(scores.logprobs) != row.scores_count:
        return False
    return _tops_fit(scores.tops, row.scores_count, row.live.request.prompt_top_tokens or 0)


def _tops_fit(tops: tuple[TopTokens, ...], places_count: int, tops_count: int) -> bool:
    """Whether each place lists its likeliest tokens; a small vocabulary may have fewer."""
    if not tops_count:
        return not tops
    if len(tops) != places_count:
        return False
    return all(0 < len(t.token_ids) == len(t.logprobs) <= tops_count for t in tops)
