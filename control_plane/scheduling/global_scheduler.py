"""Which group a request goes to: the one that is through with its work first, this included."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.scheduling.chip_load_table import GroupLoad, answer_tokens
from control_plane.scheduling.live_request import LiveRequest
from control_plane.scheduling.residency import Residency

BARRIER_S = 10.0
"""What it costs to go where blocks would not suffice: more than a cached prefix ever saves."""

MOVE_GAIN_S = 0.005
"""A waiting request changes group only for at least this much."""

EVEN_SPEEDS = 1.25
"""Groups that take at most so many times as long as the fastest count as equal to it: step times of
equal chips differ as much by chance, and equal chips are to get equal shares."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A group for a request, what it would compute and take there; and how long the group would
    have to compute then."""

    group_id: str
    tokens: int
    blocks: int
    work_s: float


def choose_group(
    live: LiveRequest, groups: Iterable[GroupLoad], resident: Mapping[str, Residency]
) -> Choice | None:
    """The best of the groups that can ever hold the request; None if none can.

    Of equals the one with fewest requests, then the one that waited longest for a request.
    """
    able = [load for load in groups if can_hold(live, load)]
    best: tuple[float, int, int, str] | None = None
    chosen: Choice | None = None
    for load, token_s in zip(able, even_speeds(able), strict=True):
        choice = weigh_group(live, load, resident.get(load.group_id), token_s)
        rank = (choice.work_s, load.requests_count, load.last_dispatch, load.group_id)
        if best is None or rank < best:
            best, chosen = rank, choice
    return chosen


def can_hold(live: LiveRequest, load: GroupLoad) -> bool:
    """Whether a group is allowed and its memory large enough for the whole request."""
    target = live.request.target_group
    if target is not None and target != load.group_id:
        return False
    most = max(live.computed_max, len(live.token_ids))
    return load.kv.cost(most) <= load.total_blocks


def even_speeds(groups: Iterable[GroupLoad]) -> list[float]:
    """Seconds of a prompt's token in each of the groups that are compared."""
    token_s = [load.speed.token_s for load in groups]
    fastest_s = min(token_s, default=0.0)
    return [fastest_s if each <= EVEN_SPEEDS * fastest_s else each for each in token_s]


def weigh_group(
    live: LiveRequest, load: GroupLoad, residency: Residency | None, token_s: float
) -> Choice:
    """What a request would cost in a group, the group's load being without it.

    residency: the end of the prefix it can use there. token_s: as `even_speeds` says.
    """
    known_count = len(live.token_ids)
    depth = residency.depth if residency else 0
    tokens = known_count - depth * load.kv.block_tokens
    blocks = load.kv.cost(known_count + 1, depth)
    mine = tokens + answer_tokens(live.tokens_left)
    work_s = (load.queued_tokens + load.answer_tokens + mine) * token_s
    over_count = load.requests_count + 1 - load.slots_count
    if over_count > 0:
        work_s += over_count * load.request_s / load.slots_count
    if blocks + load.queued_blocks > load.available_blocks:
        work_s += BARRIER_S
    return Choice(load.group_id, tokens, blocks, work_s)
