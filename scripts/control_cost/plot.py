"""What the control plane costs, as a picture; needs matplotlib, the extra `plot`."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.control_cost.costs import BUDGET_S, STAGES, Costs
from scripts.control_cost.report import TITLES, US

WIDTH, PANEL_HEIGHT = 9.0, 3.6


def draw(costs: Costs, path: Path) -> None:
    """Above a bar for every number of groups and cached blocks, below one for every kind of
    stream. Raises OSError."""
    figure = Figure(figsize=(WIDTH, 2 * PANEL_HEIGHT), layout="constrained")
    _draw_steps(figure.add_subplot(2, 1, 1), costs)
    _draw_streams(figure.add_subplot(2, 1, 2), costs)
    figure.savefig(path, dpi=150)


def _draw_steps(axes: Axes, costs: Costs) -> None:
    bottoms = [0.0] * len(costs.steps)
    places = range(len(costs.steps))
    for name in STAGES:
        heights = [cost.stages[name].median_s * US for cost in costs.steps]
        axes.bar(places, heights, bottom=bottoms, label=TITLES[name])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.axhline(BUDGET_S * US, linestyle="--", color="black", linewidth=1)
    axes.set_title(f"Processor time of a step of {costs.extent.rows} rows, µs", loc="left")
    labels = [f"{cost.groups} x {cost.blocks:,}" for cost in costs.steps]
    axes.set_xticks(places, labels, fontsize="small")
    axes.set_xlabel("groups x cached blocks")
    _finish(axes)


def _draw_streams(axes: Axes, costs: Costs) -> None:
    places = range(len(costs.streams))
    detokenize = [cost.detokenize_s * US for cost in costs.streams]
    axes.bar(places, detokenize, label="Detokenize")
    axes.bar(
        places, [cost.stream_s * US for cost in costs.streams], bottom=detokenize, label="Stream"
    )
    axes.set_title("Processor time of a token on its way to a client, µs", loc="left")
    labels = [f"{cost.protocol}\n{cost.tokens_per_event:.1f} an event" for cost in costs.streams]
    axes.set_xticks(places, labels, fontsize="small")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
