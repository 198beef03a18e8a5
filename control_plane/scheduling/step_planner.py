"""What the next step computes: plain functions from queues and budgets to rows."""

from collections.abc import Sequence
from typing import NamedTuple

from control_plane.scheduling.live_request import LiveRequest, Placement
from control_plane.scheduling.messages import StepRow


class PlannedRow(NamedTuple):
    """A row of a step and the request it belongs to, as it was placed then.

    It computes tokens_count tokens from index `start` on. scores_count: log-probabilities of prompt
    tokens it returns; None if it has no part in scoring.
    """

    live: LiveRequest
    placement: Placement
    start: int
    tokens_count: int
    sampled: bool
    is_prefill: bool
    scores_count: int | None = None

    def message(self) -> StepRow:
        """What the workers are told."""
        return StepRow(self.placement.slot, self.tokens_count, self.sampled)


def share_chunk(demands: Sequence[int], chunk_tokens: int, oldest_share: float) -> list[int]:
    """Divides a chunk among unfinished prefills; demands[0] is the oldest's.

    The oldest is sure of its share, so that no long prompt starves; then the shortest go first, so
    that none waits behind a long one; what is left is the oldest's again.
    """
    shares = [0] * len(demands)
    if not demands or not chunk_tokens:
        return shares
    sure = min(demands[0], max(1, round(chunk_tokens * oldest_share)))
    left = chunk_tokens - sure
    for i in sorted(range(1, len(demands)), key=lambda i: demands[i]):
        shares[i] = min(demands[i], left)
        left -= shares[i]
    shares[0] = min(demands[0], sure + left)
    return shares


def has_chunk_left(demands: Sequence[int], chunk_tokens: int, oldest_share: float) -> bool:
    """Whether one more prefill would surely get a token of this step."""
    if not demands:
        return chunk_tokens > 0
    sure = min(demands[0], max(1, round(chunk_tokens * oldest_share)))
    return sum(demands[1:]) < chunk_tokens - sure


def prefill_demand(placement: Placement) -> int:
    """Tokens a prefill could compute now: known to the workers and not planned yet."""
    known_count = min(placement.admitted_count, placement.sent_count)
    if placement.scoring and known_count < placement.admitted_count:
        known_count -= 1  # A token scores the next one, which must be known too.
    return known_count - placement.planned_count


def is_prefill(placement: Placement) -> bool:
    """Whether ids known at admission are still to be planned."""
    return placement.planned_count < placement.admitted_count


def wants_decode(live: LiveRequest, placement: Placement) -> bool:
    """Whether one more token can be planned: prefill is planned and the length is not reached."""
    # A row computes one token and draws the next, so that the last one needs no row.
    return placement.admitted_count <= placement.planned_count < live.computed_max


def plan_rows(
    decodes: Sequence[LiveRequest],
    prefills: Sequence[LiveRequest],
    chunk_tokens: int,
    oldest_share: float,
) -> list[PlannedRow]:
    """Decode rows first, then chunks; both in order of arrival. Every decode has its block.

    Changes nothing: `commit_rows` does.
    """
    rows: list[PlannedRow] = []
    for live in decodes:
        assert live.placement, live.request_id
        rows.append(PlannedRow(live, live.placement, live.placement.planned_count, 1, True, False))
    placements = [live.placement for live in prefills if live.placement]
    demands = [prefill_demand(placement) for placement in placements]
    shares = share_chunk(demands, chunk_tokens, oldest_share)
    for live, placement, share in zip(prefills, placements, shares, strict=True):
        if share:
            ends = placement.planned_count + share == placement.admitted_count
            start = placement.planned_count
            scores_count = _scores_count(live, start, share) if placement.scoring else None
            rows.append(PlannedRow(live, placement, start, share, ends, True, scores_count))
    return rows


def _scores_count(live: LiveRequest, start: int, tokens_count: int) -> int | None:
    """Of a row of prefill; None if it computes nothing of the prompt.

    start ........ start + tokens_count       tokens it computes
      start + 1 .... start + tokens_count     tokens these score, up to the prompt's last
    """
    if start >= live.prompt_count:
        return None
    return min(start + tokens_count, live.prompt_count - 1) - start


def commit_rows(rows: Sequence[PlannedRow]) -> None:
    """Counts the rows of a step that is sent."""
    for row in rows:
        row.placement.planned_count += row.tokens_count
        row.placement.rows_in_flight += 1
