"""What the control plane costs, as tables for people and as JSON."""

from datetime import datetime

from rich.table import Table

from scripts.control_cost.answer_streams import StreamCost
from scripts.control_cost.costs import BUDGET_S, STAGES, Costs, RouteCost, Spread, StepCost
from scripts.titled_table import titled_table
from scripts.workloads.machine import measured_here

US = 1e6
TITLES = {"plan": "Plan", "encode": "Encode", "transport": "Send, receive", "apply": "Apply"}


def step_table(costs: Costs) -> Table:
    """A row for every number of groups and cached blocks, a column for every stage."""
    extent = costs.extent
    title = (
        f"Processor time of a step of {extent.rows} rows in µs: median (p99) of "
        f"{extent.steps} steps"
    )
    names = ("Groups", "Cached blocks", *(TITLES[name] for name in STAGES), "Together")
    table = titled_table(title, (), (*names, f"Of {BUDGET_S * 1e3:g} ms"))
    for cost in costs.steps:
        table.add_row(
            f"{cost.groups}",
            f"{cost.blocks:,}",
            *(_spread(cost.stages[name]) for name in STAGES),
            f"{cost.total_s * US:.0f}",
            f"{cost.total_s / BUDGET_S:.0%}",
        )
    return table


def stream_table(costs: Costs) -> Table:
    """A row for every protocol, as tokens come and coalesced."""
    title = f"Processor time of tokens on their way to {costs.extent.rows} clients, µs"
    numbers = ("Tokens an event", "Detokenize, a token", "Stream, an event", "Together, a token")
    table = titled_table(title, ["Protocol"], numbers)
    for cost in costs.streams:
        table.add_row(
            {"http": "HTTP", "grpc": "gRPC"}[cost.protocol],
            f"{cost.tokens_per_event:.1f}",
            f"{cost.detokenize_s * US:.1f}",
            f"{cost.stream_s * cost.tokens_per_event * US:.1f}",
            f"{(cost.detokenize_s + cost.stream_s) * US:.1f}",
        )
    return table


def route_table(costs: Costs) -> Table:
    """A row for every number of frontends."""
    title = (
        f"Processor time of the tokens of a step of {costs.extent.rows} rows on their way to "
        "frontends, µs: median (p99)"
    )
    table = titled_table(title, (), ("Frontends", "Route, a step"))
    for cost in costs.routes:
        table.add_row(f"{cost.frontends}", _spread(cost.step))
    return table


def document(costs: Costs, started: datetime, *, quick: bool) -> dict[str, object]:
    """Everything as JSON has it; nothing is rounded."""
    extent = costs.extent
    return {
        **measured_here(started.isoformat(timespec="seconds")),
        "quick": quick,
        "rows": extent.rows,
        "steps": extent.steps,
        "seed": extent.seed,
        "budget_us": BUDGET_S * US,
        "step_costs": [_step_object(cost) for cost in costs.steps],
        "stream_costs": [_stream_object(cost) for cost in costs.streams],
        "route_costs": [_route_object(cost) for cost in costs.routes],
    }


def _spread(spread: Spread) -> str:
    return f"{spread.median_s * US:.0f} ({spread.p99_s * US:.0f})"


def _step_object(cost: StepCost) -> dict[str, object]:
    return {
        "groups": cost.groups,
        "cached_blocks": cost.blocks,
        "stages": {
            name: {"median_us": spread.median_s * US, "p99_us": spread.p99_s * US}
            for name, spread in cost.stages.items()
        },
        "total_us": cost.total_s * US,
        "budget_share": cost.total_s / BUDGET_S,
    }


def _route_object(cost: RouteCost) -> dict[str, object]:
    return {
        "frontends": cost.frontends,
        "median_us": cost.step.median_s * US,
        "p99_us": cost.step.p99_s * US,
    }


def _stream_object(cost: StreamCost) -> dict[str, object]:
    return {
        "protocol": cost.protocol,
        "tokens_at_once": cost.tokens_at_once,
        "tokens_per_event": cost.tokens_per_event,
        "detokenize_us_per_token": cost.detokenize_s * US,
        "stream_us_per_event": cost.stream_s * cost.tokens_per_event * US,
        "total_us_per_token": (cost.detokenize_s + cost.stream_s) * US,
    }
