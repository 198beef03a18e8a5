"""What a row of a finished step brings its request: tokens, scores of its prompt, or failure."""

import math

from control_plane.scheduling.live_request import LiveRequest
from control_plane.scheduling.messages import PromptDelta, PromptScores, RowResult, TokenDelta
from control_plane.scheduling.step_planner import PlannedRow


def token_delta(live: LiveRequest, result: RowResult) -> TokenDelta:
    """The tokens a row drew, as its request's next ones."""
    request = live.request
    # By position, which halves the time: there is one for every row of every step.
    return TokenDelta(
        request.request_id,
        live.output_count,
        result.token_ids,
        result.logprobs if request.wants_logprobs else (),
        live.facts,
        result.tops,
        result.logits,
    )


def is_finite(result: RowResult | None, scored: PromptScores | None) -> bool:
    """Whether a row's logits were numbers, as far as it tells."""
    if result and not result.finite:
        return False
    return not (scored and any(math.isnan(logprob) for logprob in scored.logprobs))


def new_scores(row: PlannedRow, scored: PromptScores) -> list[PromptDelta]:
    """The scores of a row that were not delivered before a retraction or the loss of a group."""
    live = row.live
    first_index = row.start + 1
    known_count = max(0, live.scored_count - first_index)
    logprobs = scored.logprobs[known_count:]
    if not logprobs:
        return []
    live.scored_count += len(logprobs)
    scores = PromptScores(logprobs, scored.tops[known_count:])
    return [PromptDelta(live.request_id, first_index + known_count, scores)]
