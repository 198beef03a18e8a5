"""What steps cost, as a table for people and as JSON."""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.table import Table

from scripts.step_cost.costs import OTHER, Costs, StepCost
from scripts.titled_table import titled_table
from scripts.workloads.machine import measured_here

SMALL_SHARE = 0.01
"""Operations that take less of every step have no column of their own."""


def step_table(costs: Costs) -> Table:
    """A row for each load: a step, how near it is to what memory gives, and what calls cost."""
    numbers = ("Step", "Weights, GB/s", "Of memory", "Calls", "Called one by one", "Between calls")
    table = titled_table("Steps, ms: medians", ["Load"], numbers)
    for cost in costs.steps:
        share = share_of_memory(costs, cost)
        table.add_row(
            cost.load.text,
            _ms(cost.step_s),
            f"{costs.weight_bytes / cost.step_s / 1e9:.1f}",
            "-" if share is None else f"{share:.0%}",
            str(cost.calls),
            _ms(cost.computed_s),
            _ms(cost.operation_s[OTHER]),
        )
    return table


def operation_table(costs: Costs) -> Table:
    """A row for each load: what each operation takes of a step whose operations are called."""
    names = columns(costs)
    title = "Time by operation, % of a step that is called operation by operation"
    table = titled_table(title, ["Load"], names)
    for cost in costs.steps:
        shares = shares_of(cost)
        told = {name: shares.get(name, 0.0) for name in names}
        told[OTHER] = 1 - sum(share for name, share in told.items() if name != OTHER)
        table.add_row(cost.load.text, *(f"{100 * told[name]:.1f}" for name in names))
    return table


def columns(costs: Costs) -> list[str]:
    """Operations that take a visible part of some step, the largest first, and OTHER."""
    largest: dict[str, float] = {}
    for cost in costs.steps:
        for name, share in shares_of(cost).items():
            largest[name] = max(share, largest.get(name, 0.0))
    visible = [name for name, share in largest.items() if name != OTHER and share >= SMALL_SHARE]
    return [*sorted(visible, key=lambda name: -largest[name]), OTHER]


def shares_of(cost: StepCost) -> dict[str, float]:
    """Part of the called step that each operation takes."""
    return {name: seconds / cost.computed_s for name, seconds in cost.operation_s.items()}


def share_of_memory(costs: Costs, cost: StepCost) -> float | None:
    """Of what the cores read of memory the part that this step's weights are; None if unknown."""
    if not costs.read_per_s:
        return None
    return costs.weight_bytes / cost.step_s / costs.read_per_s


def remarks(costs: Costs) -> list[str]:
    """Why the figures may mislead."""
    shares = [share_of_memory(costs, cost) or 0.0 for cost in costs.steps]
    if max(shares) <= 1:
        return []
    return [
        f"a step read {max(shares):.0%} of what memory gave when it was probed before: the machine "
        "was busier then, so measure again when it is idle; or the weights fit the processor's "
        "caches"
    ]


def document(costs: Costs, started: datetime) -> dict[str, Any]:
    """Everything as JSON has it; times in seconds."""
    return {
        **measured_here(started.isoformat(timespec="seconds")),
        "chip": dict(costs.chip),
        "context_tokens": costs.extent.context,
        "repeats": costs.extent.repeats,
        "weight_bytes": costs.weight_bytes,
        "memory_read_per_s": costs.read_per_s,
        "steps": [
            {**cost.load._asdict(), **asdict(cost), "of_memory": share_of_memory(costs, cost)}
            for cost in costs.steps
        ],
        "remarks": remarks(costs),
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
