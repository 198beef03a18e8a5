"""Which group a request goes to: the one where its first token is expected first."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.scheduling.chip_load_table import GroupLoad
from control_plane.scheduling.live_request import LiveRequest
from control_plane.scheduling.residency import Residency

BARRIER_S = 10.0
"""What it costs to go where blocks would not suffice: more than a cached prefix ever saves."""

MOVE_GAIN_S = 0.005
"""A waiting request changes group only for at least this much."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A group for a request, what it would compute and take there, and when it would answer."""

    group_id: str
    tokens: int
    blocks: int
    first_token_s: float


def choose_group(
    live: LiveRequest, groups: Iterable[GroupLoad], resident: Mapping[str, Residency]
) -> Choice | None:
    """The best of the groups that can ever hold the request; None if none can."""
    best: tuple[float, int, str] | None = None
    chosen: Choice | None = None
    for load in groups:
        if not can_hold(live, load):
            continue
        choice = weigh_group(live, load, resident.get(load.group_id))
        rank = (choice.first_token_s, load.requests_count, load.group_id)
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


def weigh_group(live: LiveRequest, load: GroupLoad, residency: Residency | None) -> Choice:
    """What a request would cost in a group, the group's load being without it; `residency` is the
    end of the prefix it can use there."""
    known_count = len(live.token_ids)
    depth = residency.depth if residency else 0
    tokens = known_count - depth * load.kv.block_tokens
    blocks = load.kv.cost(known_count + 1, depth)
    rate = max(load.prefill_tokens_per_s, 1.0)
    first_token_s = load.step_s + (load.queued_tokens + tokens) / rate
    over_count = load.requests_count + 1 - load.slots_count
    if over_count > 0:
        first_token_s += over_count * load.request_s / load.slots_count
    if blocks + load.queued_blocks > load.available_blocks:
        first_token_s += BARRIER_S
    return Choice(load.group_id, tokens, blocks, first_token_s)
