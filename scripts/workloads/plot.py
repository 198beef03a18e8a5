"""The figures of a comparison as a picture; needs matplotlib, the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from scripts.workloads.comparison import Comparison, Run
from scripts.workloads.figures import LABELS
from scripts.workloads.report import Summary, summaries

PANELS = (
    ("Tokens per second", ("decode_tokens_per_s", "output_tokens_per_s"), "linear"),
    ("Time to the first token, ms", ("ttft_p50_ms", "ttft_p99_ms", "long_ttft_ms"), "log"),
    (
        "Between tokens, ms",
        ("inter_token_p50_ms", "inter_token_p99_ms", "stall_max_ms"),
        "log",
    ),
)
"""Title, the figures in it, and the scale; a panel without any of them is left out."""
UNITS = (" tokens/s", " ms")
GROUP_WIDTH = 0.8
PANEL_WIDTH, PANEL_HEIGHT = 9.0, 3.2


def draw(comparison: Comparison, runs: Sequence[Run], path: Path) -> None:
    """Bars are medians, lines on them reach from least to most. Raises OSError."""
    found = summaries(comparison, runs)
    panels = [panel for panel in PANELS if any(each.figure in panel[1] for each in found)]
    figure = Figure(figsize=(PANEL_WIDTH, PANEL_HEIGHT * max(1, len(panels))), layout="constrained")
    for place, (title, names, scale) in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, place)
        axes.set_title(title, loc="left")
        axes.set_yscale(scale)
        if scale == "log":  # plain numbers instead of powers of ten
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter())
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        _draw_bars(axes, comparison, [each for each in found if each.figure in names])
    if panels:
        figure.axes[0].legend()
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Axes, comparison: Comparison, found: Sequence[Summary]) -> None:
    """A group of bars for each figure of each workload, one bar a server."""
    groups = list(dict.fromkeys((each.workload, each.figure) for each in found))
    width = GROUP_WIDTH / len(comparison.servers)
    for index, server in enumerate(comparison.servers):
        own = [each for each in found if each.server_index == index]
        axes.bar(
            [
                groups.index((each.workload, each.figure)) - GROUP_WIDTH / 2 + (index + 0.5) * width
                for each in own
            ],
            [each.median for each in own],
            width,
            yerr=[
                [each.median - each.least for each in own],
                [each.most - each.median for each in own],
            ],
            capsize=3,
            label=server.label,
        )
    labels = [f"{workload}\n{LABELS[figure]}" for workload, figure in groups]
    for unit in UNITS:
        labels = [label.removesuffix(unit) for label in labels]
    axes.set_xticks(range(len(groups)), labels, fontsize="small")
