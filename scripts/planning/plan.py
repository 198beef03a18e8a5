"""A whole plan: every layout with what it holds and how fast it may be, and what to take."""

from collections.abc import Mapping
from dataclasses import dataclass

from scripts.calibration.calibration_file import Calibration
from scripts.planning.advice import Advice, Shortage, advise, shortage
from scripts.planning.capacity import Capacity, Wishes, capacity
from scripts.planning.layouts import Layout, layouts
from scripts.planning.needs import Chips, ModelNeeds
from scripts.planning.speed import Speed, speed, why_useless


@dataclass(frozen=True, slots=True)
class Row:
    """A layout under one KV policy, or under several that come to the same."""

    held: Capacity
    speed: Speed | None


@dataclass(frozen=True, slots=True)
class Plan:
    """uncalibrated: why there are no speeds at all; None where some are known."""

    model: ModelNeeds
    chips: Chips
    wishes: Wishes
    rows: tuple[Row, ...]
    advice: Advice | None
    uncalibrated: str | None


def make_plan(
    model: ModelNeeds, chips: Chips, wishes: Wishes, calibration: Calibration | None
) -> Plan:
    """The plan for a model on these chips."""
    kv_groups = wishes.kv_groups(model.kv_windows)
    held = [
        capacity(layout, needs, chips, kv_groups, wishes)
        for layout in layouts(chips.count)
        for needs in model.of_size(layout.size)
    ]
    useless = "no --calibration was given"
    if calibration is not None:
        useless = why_useless(calibration, model, chips) or ""
    known = None if useless else calibration
    rows = tuple(
        Row(each, None if known is None else speed(known, model, each, chips, wishes))
        for each in held
    )
    return Plan(model, chips, wishes, rows, advise(held, model, chips), useless or None)


def shortage_of(plan: Plan, fewer_bits: Mapping[str, Plan]) -> Shortage:
    """What is missing where nothing fits. fewer_bits: plans with other values of --weights."""
    model, chips, wishes = plan.model, plan.chips, plan.wishes
    kv_groups = wishes.kv_groups(model.kv_windows)
    # More chips that share this machine's memory are no remedy.
    larger = [
        capacity(Layout(1, needs.size, 0), needs, chips, kv_groups, wishes)
        for needs in model.groups
        if needs.size > chips.count and not chips.shared
    ]
    advices = {weights: other.advice for weights, other in fewer_bits.items()}
    held = [row.held for row in plan.rows]
    return shortage(held, larger, advices, kv_groups, wishes, chips)
