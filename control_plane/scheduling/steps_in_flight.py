"""The steps of a group on their way: what their results must look like, when the last one ends."""

from collections import deque
from dataclasses import dataclass

from control_plane.scheduling.messages import PromptScores, RowResult, TopTokens
from control_plane.scheduling.step_planner import PlannedRow
from control_plane.scheduling.step_time import StepTimeModel, StepWork, context_of_chunk

EARLY_ERRORS = 2
"""So many usual errors earlier than predicted a step may well end."""


@dataclass(slots=True)
class StepInFlight:
    """A step that was sent; started_at is when the chips began it, as far as we can tell.

    predicted_s: how long it was expected to take when it was sent.
    """

    step_id: int
    rows: list[PlannedRow]
    work: StepWork
    predicted_s: float
    started_at: float


class StepsInFlight:
    """In the order they were sent, which is the order they run in."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self.predicted_s = 0.0
        """What all steps that ended were expected to take together."""
        self._steps: deque[StepInFlight] = deque()
        self._step_time = step_time

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def started_at(self) -> float:
        """When the oldest began: as it was sent, or as the one before it ended."""
        return self._steps[0].started_at

    def add(self, step_id: int, rows: list[PlannedRow], now: float) -> None:
        """A step is sent."""
        work = _work_of(rows)
        predicted_s = self._step_time.predict(work)
        self._steps.append(StepInFlight(step_id, rows, work, predicted_s, now))

    def forgive(self, stall_s: float) -> None:
        """The control plane itself stood still so long: no step took that time."""
        for step in self._steps:
            step.started_at += stall_s

    def plan_at(self, lead_s: float) -> float | None:
        """`lead_s` before the last one ends, as far as expected; None if none is or is known."""
        if not self._steps or not self._step_time.is_known:
            return None
        earliest_end = self._steps[0].started_at
        for step in self._steps:
            usual_errors = EARLY_ERRORS * self._step_time.error(step.work)
            earliest_end += self._step_time.predict(step.work) * (1 - usual_errors)
        return earliest_end - lead_s

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

    def take(self, now: float, device_s: float) -> StepInFlight:
        """The oldest step ended; the next one begins.

        device_s: how long the chips say they took; 0 if they do not. Times of arrival would blame
        a step for what the network and this process took, and for waiting behind another step.
        """
        step = self._steps.popleft()
        if step.rows:  # One that only releases slots takes no time to speak of.
            self._step_time.observe(step.work, device_s or now - step.started_at)
            self.predicted_s += step.predicted_s
        if self._steps:
            self._steps[0].started_at = now
        return step


def _work_of(rows: list[PlannedRow]) -> StepWork:
    chunks = [row for row in rows if row.is_prefill]
    decodes = [row for row in rows if not row.is_prefill]
    return StepWork(
        chunk_tokens=sum(row.tokens_count for row in chunks),
        chunk_context=sum(context_of_chunk(row.start, row.tokens_count) for row in chunks),
        decode_rows=len(decodes),
        decode_context=sum(row.start + 1 for row in decodes),
    )


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
