"""A plan for people, line by line, and as plain values for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scripts.planning.advice import Advice, Shortage, in_words
from scripts.planning.capacity import Capacity
from scripts.planning.plan import Plan, Row
from scripts.planning.speed import Speed
from scripts.text_table import text_table

NOT_MEASURED = "not measured"
EXTRAPOLATED, BEYOND = "~", "*"
HEADS = (
    "groups",
    "chips each",
    "kv policy",
    "weights",
    "KV a token",
    "KV blocks",
    "tokens",
    "requests",
    "left free",
    "serves",
)
SPEED_HEADS = ("decode step", "decode tokens/s", "all groups", "prefill tokens/s")
EXTRAPOLATION = (
    f"{EXTRAPOLATED} extrapolated from groups of another size: what a chip computes grows with its "
    "part of the weights and heads; the fixed time of a step is kept whole, and sums between chips "
    "are not included (`polychip bench collectives` measures those of this machine)"
)
SHARING = (
    "These chips share a memory, so that each slows the others down: only groups of the size "
    "measured are known, and one alone. Measure others with `polychip calibrate`"
)
BEYOND_MEASURED = f"{BEYOND} more rows, or longer contexts, than any step that was measured"


def size_text(count: int) -> str:
    """Bytes for people, of at least three digits."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def plan_lines(plan: Plan) -> list[str]:
    """What is planned, the table, and what its signs mean."""
    model, chips, wishes = plan.model, plan.chips, plan.wishes
    ratio = model.weight_bytes / max(1, chips.bytes_each)
    memory = (
        f"share {size_text(chips.free_bytes)} of free memory"
        if chips.shared
        else f"with {size_text(chips.free_bytes)} of free memory each"
    )
    lines = [
        f"Model: {model.architecture}, {model.dtype}, --weights {model.weights}: "
        f"P = {size_text(model.weight_bytes)} on one chip",
        f"Chips: {chips.count} of {chips.backend}, {memory}: M = {size_text(chips.bytes_each)}, "
        f"P/M = {ratio:.2f}",
        f"Requests: {wishes.context_tokens} tokens each, of which a group is to hold "
        f"{wishes.requests_min} at once and computes at most {wishes.running_max}",
        "",
        *text_table(_table(plan)),
        "",
        "Sizes are of the chip that holds the most, counts of one group. What is left free is for "
        "activations and for what is not counted here.",
    ]
    if plan.uncalibrated is not None:
        lines.append(f"Speeds are not known: {plan.uncalibrated}.")
    lines += _notes_on_speeds(
        [row.speed for row in plan.rows if row.speed is not None], chips.shared and chips.count > 1
    )
    held = plan.rows[0].held if plan.rows else None
    if held is not None and held.window_bytes:
        lines.append(
            "Layers with a window take more KV than for each token: at most "
            f"{size_text(held.window_bytes)} a request on one chip."
        )
    lines += [f"Not possible: {why}" for why in model.refused]
    return lines


def _notes_on_speeds(speeds: Sequence[Speed], shared: bool) -> list[str]:
    if not speeds:
        return []
    rows = " or ".join(str(count) for count in sorted({speed.rows for speed in speeds}))
    lines = [
        f"Decode: steps of {rows} rows, each in the middle of its context. Prefill: the first "
        "chunk of a prompt alone. Tokens/s are of one group unless it says all.",
    ]
    if any(speed.extrapolated for speed in speeds):
        lines.append(EXTRAPOLATION)
    if any(speed.beyond for speed in speeds):
        lines.append(BEYOND_MEASURED)
    if shared:
        lines.append(SHARING)
    return lines


def _table(plan: Plan) -> list[tuple[str, ...]]:
    """The rows and their heads; without a calibration there are no columns for speeds."""
    if plan.uncalibrated is not None:
        return [HEADS, *(_cells(row.held) for row in plan.rows)]
    rows = [(*_cells(row.held), *_speed_cells(row.speed)) for row in plan.rows]
    return [(*HEADS, *SPEED_HEADS), *rows]


def _cells(held: Capacity) -> tuple[str, ...]:
    layout = held.layout
    left_over = f" ({layout.left_over} left over)" if layout.left_over else ""
    return (
        f"{layout.groups}{left_over}",
        str(layout.size),
        "any" if layout.size == 1 else ", ".join(held.needs.policies),
        size_text(held.needs.weight_bytes),
        size_text(held.token_bytes),
        str(held.blocks),
        str(held.tokens),
        str(held.requests),
        size_text(held.left_bytes),
        verdict(held),
    )


def _speed_cells(speed: Speed | None) -> tuple[str, ...]:
    if speed is None:
        return (NOT_MEASURED,) * len(SPEED_HEADS)
    before, behind = EXTRAPOLATED * speed.extrapolated, BEYOND * speed.beyond
    total = speed.total_decode_tokens_per_s
    return (
        f"{before}{speed.decode_step_s * 1000:.1f} ms{behind}",
        f"{before}{speed.decode_tokens_per_s:.0f}{behind}",
        NOT_MEASURED if total is None else f"{before}{total:.0f}{behind}",
        f"{before}{speed.prefill_tokens_per_s:.0f}{behind}",
    )


def verdict(held: Capacity) -> str:
    """Whether a layout serves what is wished for, and what it lacks."""
    if held.serves:
        return "yes"
    if held.can_serve:
        return f"with --kv-blocks {held.blocks_needed}"
    return f"no, {size_text(held.missing_bytes)} missing"


def advice_lines(plan: Plan, advice: Advice, command: str) -> list[str]:
    """The layout to take, why, and how to start it."""
    held, layout, wishes = advice.taken, advice.taken.layout, plan.wishes
    blocks = advice.kv_blocks or held.blocks
    requests = blocks * wishes.requests_min // held.blocks_needed
    policy = "" if layout.size == 1 else f", KV policy {advice.policy}"
    lines = [
        "",
        f"Take {in_words(layout)}{policy}: {advice.rule}.",
        f"A chip holds {size_text(held.needs.weight_bytes)} of weights and {blocks} KV blocks "
        f"({size_text(blocks * held.needs.block_bytes)}): a group has room for {requests} x "
        f"{wishes.context_tokens} tokens, where {wishes.requests_min} x {wishes.context_tokens} "
        "are needed.",
    ]
    if advice.kv_blocks is not None:
        lines.append(
            f"By themselves workers would take {held.blocks} blocks, a share of what is free: too "
            "few, so --kv-blocks says how many."
        )
    if layout.left_over:
        lines.append(f"Chips left over: {layout.left_over}; they may serve groups of their own.")
    return [*lines, "", f"  {command}", ""]


def shortage_lines(plan: Plan, found: Shortage) -> list[str]:
    """What is missing, and what would help."""
    held = found.nearest
    return [
        "",
        f"Nothing fits: {in_words(held.layout)} comes nearest, and each chip lacks "
        f"{held.missing_bytes} bytes ({size_text(held.missing_bytes)}) for its weights "
        f"({size_text(held.needs.weight_bytes)}) and {plan.wishes.requests_min} x "
        f"{plan.wishes.context_tokens} tokens of KV "
        f"({size_text(held.blocks_needed * held.needs.block_bytes)}, and the reserve).",
        *(f"  - {remedy}" for remedy in found.remedies),
        "",
    ]


def plan_values(plan: Plan, end: Advice | Shortage, command: str | None) -> dict[str, Any]:
    """Everything as plain values: sizes in bytes, times in seconds."""
    model, chips = plan.model, plan.chips
    values: dict[str, Any] = {
        "model": {
            "architecture": model.architecture,
            "digest": model.digest,
            "dtype": model.dtype,
            "weights": model.weights,
            "weight_bytes": model.weight_bytes,
            "kv_windows": model.kv_windows,
        },
        "chips": asdict(chips) | {"bytes_each": chips.bytes_each},
        "wishes": asdict(plan.wishes),
        "weights_over_memory": model.weight_bytes / max(1, chips.bytes_each),
        "uncalibrated": plan.uncalibrated,
        "layouts": [_layout_values(row.held, row) for row in plan.rows],
        "refused": model.refused,
        "advice": None,
        "shortage": None,
    }
    if isinstance(end, Advice):
        values["advice"] = {
            "groups": end.taken.layout.groups,
            "size": end.taken.layout.size,
            "kv_policy": end.policy,
            "kv_blocks": end.kv_blocks,
            "rule": end.rule,
            "command": command,
        }
    else:
        values["shortage"] = {
            "size": end.nearest.layout.size,
            "missing_bytes": end.nearest.missing_bytes,
            "remedies": end.remedies,
        }
    return values


def _layout_values(held: Capacity, row: Row) -> dict[str, Any]:
    counts = {
        name: getattr(held, name)
        for name in (
            "blocks",
            "blocks_most",
            "blocks_needed",
            "tokens",
            "requests",
            "token_bytes",
            "window_bytes",
            "left_bytes",
            "missing_bytes",
        )
    }
    return {
        **asdict(held.layout),
        "kv_policies": held.needs.policies,
        "ranks": [asdict(rank) for rank in held.needs.ranks],
        **counts,
        "serves": held.serves,
        "can_serve": held.can_serve,
        "speed": None if row.speed is None else asdict(row.speed),
    }
