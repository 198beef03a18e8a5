"""A calibration as a picture; needs matplotlib, the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.calibration.measurement import Measurement
from scripts.calibration.recommendation import SHARE, Rate

WIDTH, PANEL_HEIGHT = 9.0, 3.6
THROUGHPUT, TIME, CHOICE = "tab:blue", "tab:orange", "tab:green"


def draw(measured: Measurement, path: Path) -> None:
    """Above prefill throughput over the size of chunks, below decode throughput and the time of a
    step over the rows; what is recommended is marked. Raises OSError."""
    settings, sweep = measured.calibration.settings, measured.sweep
    figure = Figure(figsize=(WIDTH, 2 * PANEL_HEIGHT), layout="constrained")
    calibration = measured.calibration
    figure.suptitle(
        f"{Path(calibration.model).name}, {calibration.dtype}, {calibration.backend}, chips: "
        f"{calibration.group_size}",
        fontsize="medium",
    )
    chunks = figure.add_subplot(2, 1, 1)
    _draw_rates(chunks, measured.chunk_rates, settings.chunk_tokens)
    chunks.set_title(f"Prefill of a prompt of {sweep.prompt_tokens} tokens", loc="left")
    chunks.set_xlabel("tokens of a chunk")
    batches = figure.add_subplot(2, 1, 2)
    _draw_rates(batches, measured.batch_rates, settings.running_max)
    batches.set_title(f"Decode behind {sweep.position} tokens", loc="left")
    batches.set_xlabel("rows of a step")
    _draw_times(batches.twinx(), measured)
    figure.savefig(path, dpi=150)


def _draw_rates(axes: Axes, rates: Sequence[Rate], chosen: int) -> None:
    sizes = [rate.size for rate in rates]
    speeds = [rate.tokens_per_s for rate in rates]
    axes.plot(sizes, speeds, marker="o", color=THROUGHPUT, label="tokens/s")
    axes.axhline(
        SHARE * max(speeds),
        linestyle="--",
        color=THROUGHPUT,
        linewidth=1,
        label=f"{SHARE:.0%} of the best",
    )
    axes.axvline(chosen, color=CHOICE, linewidth=2, label=f"recommended: {chosen}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _draw_times(axes: Axes, measured: Measurement) -> None:
    sizes = [rate.size for rate in measured.batch_rates]
    times_ms = [point.seconds * 1e3 for point in measured.sweep.batches]
    axes.plot(sizes, times_ms, marker="s", linestyle=":", color=TIME)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms of a step", color=TIME)
