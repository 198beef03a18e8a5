"""Which layout to take: the smallest groups that hold the model and a useful KV pool.

P: bytes of the model on one chip. M: bytes a chip has. One chip a group where both fit one; else
two; four or more where P / M > 2. Of these sizes the smallest that fits is taken: each group reads
the weights once a step, and the chips of a group wait for each other in every layer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.scheduling.kv_groups import KVGroups
from scripts.planning.capacity import Capacity, Wishes
from scripts.planning.layouts import Layout
from scripts.planning.needs import Chips, ModelNeeds

PAIR_RATIO_MAX = 2.0
"""Up to this P / M two chips are tried; above it they could not even hold the weights."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The layout to take. kv_blocks: what --kv-blocks must say; None where workers find it."""

    taken: Capacity
    policy: str
    kv_blocks: int | None
    rule: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """Nothing fits. nearest: the layout that lacks the least; remedies: what would help."""

    nearest: Capacity
    remedies: tuple[str, ...]


def rule_of(model: ModelNeeds, chips: Chips, *, one_fits: bool) -> tuple[int, str]:
    """Chips of a group to begin with, and why in words."""
    ratio = model.weight_bytes / max(1, chips.bytes_each)
    if one_fits:
        return 1, f"one chip holds model and KV pool (P/M = {ratio:.2f}), so each serves a copy"
    if ratio <= PAIR_RATIO_MAX:
        return 2, f"one chip does not hold model and KV pool, and P/M = {ratio:.2f} is at most 2"
    return 4, f"P/M = {ratio:.2f} is above 2, so a group takes four chips or more"


def advise(rows: Sequence[Capacity], model: ModelNeeds, chips: Chips) -> Advice | None:
    """The layout to take of all that were looked at; None if none serves what is wished for."""
    serving = [row for row in rows if row.can_serve]
    least, rule = rule_of(model, chips, one_fits=any(row.layout.size == 1 for row in serving))
    if not serving:
        return None
    # The rule is for chips enough: three hold what it wants four for.
    fitting = [row for row in serving if row.layout.size >= least] or serving
    # The default policy comes first among equals.
    best = min(fitting, key=lambda row: (row.layout.size, not row.serves, -row.requests))
    if best.layout.size > least:
        rule += f"; {best.layout.size} are the fewest that hold model and KV pool"
    elif best.layout.size < least:
        rule += f"; of {chips.count}, {best.layout.size} hold model and KV pool"
    kv_blocks = None if best.serves else best.blocks_needed
    return Advice(best, best.needs.policies[0], kv_blocks, rule)


def shortage(
    rows: Sequence[Capacity],
    larger: Iterable[Capacity],
    fewer_bits: Mapping[str, Advice | None],
    kv_groups: KVGroups,
    wishes: Wishes,
    chips: Chips,
) -> Shortage:
    """What is missing, and what would help.

    larger: groups of more chips than there are, one layout for each size. fewer_bits: what would be
    advised with other values of --weights.
    """
    nearest = min(rows, key=lambda row: row.missing_bytes)
    remedies = [
        f"--weights {weights}: {in_words(advice.taken.layout)} would do"
        for weights, advice in fewer_bits.items()
        if advice is not None
    ]
    enough = [row for row in larger if row.can_serve]
    if enough:
        size = min(row.layout.size for row in enough)
        remedies.append(f"more chips: a group of {size} would do; there are {chips.count}")
    context = shorter_context(rows, kv_groups, wishes)
    if context:
        remedies.append(f"a shorter context: --context {context} would do")
    if not remedies:
        whose = "this machine" if chips.shared else "each chip"
        remedies.append(f"more memory of {whose}, or a smaller model")
    return Shortage(nearest, tuple(remedies))


def shorter_context(rows: Iterable[Capacity], kv_groups: KVGroups, wishes: Wishes) -> int:
    """The longest context of which the requests wished for fit some layout; 0 if none does."""
    most = max(row.blocks_most for row in rows)
    tokens = kv_groups.tokens_max(most // wishes.requests_min, wishes.context_tokens)
    return tokens if tokens > 1 else 0


def in_words(layout: Layout) -> str:
    """Such as "2 groups of 1 chip"."""
    groups = "1 group" if layout.groups == 1 else f"{layout.groups} groups"
    chips = "1 chip" if layout.size == 1 else f"{layout.size} chips"
    return f"{groups} of {chips}"
