"""What a comparison came to: medians, spreads and ratios, as a table for people and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from rich.table import Table

from scripts.titled_table import titled_table
from scripts.workloads.comparison import Comparison, Run
from scripts.workloads.figures import LABELS, SHOWN
from scripts.workloads.machine import measured_here
from scripts.workloads.server import Server
from scripts.workloads.workload import Workload


@dataclass(frozen=True)
class Summary:
    """One figure of one workload at one server, over all runs.

    ratio: the median over the runs of (this server / first server); None where the first has no
    such figure, and for the first itself.
    """

    workload: str
    figure: str
    server_index: int
    median: float
    least: float
    most: float
    ratio: float | None


def summaries(comparison: Comparison, runs: Sequence[Run]) -> list[Summary]:
    """Of the figures people are shown, by workload, figure and server."""
    found = (
        _summary(runs, workload, figure, index)
        for workload in comparison.workloads
        for figure in SHOWN[workload]
        for index in range(len(comparison.servers))
    )
    return [summary for summary in found if summary is not None]


def _summary(runs: Sequence[Run], workload: str, figure: str, index: int) -> Summary | None:
    """None if the server has no such figure."""
    own = _values(runs, workload, figure, index)
    first = _values(runs, workload, figure, 0)
    if not own:
        return None
    values = list(own.values())
    ratios = [value / first[number] for number, value in own.items() if first.get(number)]
    return Summary(
        workload,
        figure,
        index,
        median(values),
        min(values),
        max(values),
        median(ratios) if ratios and index else None,
    )


def _values(runs: Sequence[Run], workload: str, figure: str, index: int) -> dict[int, float]:
    """By the number of the run."""
    values = {
        run.number: run.figures[workload].get(figure)
        for run in runs
        if run.server_index == index and workload in run.figures
    }
    return {number: value for number, value in values.items() if value is not None}


def result_table(comparison: Comparison, runs: Sequence[Run]) -> Table:
    """A row for every figure; for every server median and spread, and how it compares."""
    count = comparison.runs_count
    title = "One run" if count == 1 else f"Median of {count} runs (least to most)"
    table = titled_table(title, ("", "Figure"))
    for index, server in enumerate(comparison.servers):
        table.add_column(server.label, justify="right")
        if index:
            table.add_column("Ratio", justify="right")
    by_place = {
        (each.workload, each.figure, each.server_index): each
        for each in summaries(comparison, runs)
    }
    for workload in comparison.workloads:
        for figure in SHOWN[workload]:
            row = [workload, LABELS[figure]]
            for index in range(len(comparison.servers)):
                summary = by_place.get((workload, figure, index))
                row += _cells(summary, index, spread=count > 1)
            table.add_row(*row)
    return table


def _cells(summary: Summary | None, index: int, *, spread: bool) -> list[str]:
    if summary is None:
        return ["-"] if index == 0 else ["-", ""]
    cell = _shown(summary.median)
    if spread:
        cell += f" ({_shown(summary.least)} to {_shown(summary.most)})"
    if index == 0:
        return [cell]
    return [cell, "" if summary.ratio is None else f"{summary.ratio:.2f}"]


def _shown(value: float) -> str:
    return f"{value:.0f}" if value == int(value) or value >= 1000 else f"{value:.1f}"


def remarks(comparison: Comparison, runs: Sequence[Run]) -> list[str]:
    """What was skipped, and why figures may not be comparable.

    Of each workload at each server once, from the first run that has something to say.
    """
    lines: list[str] = []
    said: set[tuple[int, str]] = set()
    for run in runs:
        label = comparison.servers[run.server_index].label
        for workload in comparison.workloads:
            skipped = [f"skipped: {run.skipped[workload]}"] if workload in run.skipped else []
            reasons = [*skipped, *run.doubts.get(workload, ())]
            if reasons and (run.server_index, workload) not in said:
                said.add((run.server_index, workload))
                lines += [f"{label}: {workload}, run {run.number}: {each}" for each in reasons]
    return lines


def machine_line(runs: Sequence[Run]) -> str | None:
    """What this machine gave before the runs, medians and spreads; None if nobody looked."""
    probes = [run.probe for run in runs if run.probe is not None]
    if not probes:
        return None
    parts = [
        f"{label} {_spread(values)} {unit}"
        for label, values, unit in (
            ("barrier of two cores", [probe.barrier_ns for probe in probes], "ns"),
            ("memory read by one core", [probe.read_one_gb_per_s for probe in probes], "GB/s"),
            ("by all", [probe.read_every_gb_per_s for probe in probes], "GB/s"),
        )
        if None not in values
    ]
    return f"This machine before each run: {', '.join(parts)}."


def _spread(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    shown = _shown(median(numbers))
    if len(numbers) == 1:
        return shown
    return f"{shown} ({_shown(min(numbers))} to {_shown(max(numbers))})"


def document(
    comparison: Comparison, runs: Sequence[Run], started: datetime, *, quick: bool
) -> dict[str, object]:
    """Everything as JSON has it; figures of runs are raw."""
    return {
        **measured_here(started.isoformat(timespec="seconds")),
        "tokenizer": comparison.maker.name,
        "seed": comparison.seed,
        "runs_count": comparison.runs_count,
        "quick": quick,
        "workloads": {
            name: _workload_object(workload) for name, workload in comparison.workloads.items()
        },
        "servers": [_server_object(server) for server in comparison.servers],
        "runs": [_run_object(comparison, run) for run in runs],
        "summary": [_summary_object(comparison, each) for each in summaries(comparison, runs)],
        "remarks": remarks(comparison, runs),
    }


def _workload_object(workload: Workload) -> dict[str, object]:
    return {name: value for name, value in vars(workload).items() if name != "name"}


def _server_object(server: Server) -> dict[str, object]:
    return {
        "label": server.label,
        "address": server.endpoint.address,
        "model": server.endpoint.model,
        "server": "polychip" if server.is_polychip else "other",
        "version": server.version,
        "context_tokens": server.context_tokens,
        "ignore_eos": server.endpoint.ignore_eos,
        "before_each_run": (
            "cache flushed, new prompts" if server.is_polychip else "new prompts only"
        ),
    }


def _run_object(comparison: Comparison, run: Run) -> dict[str, object]:
    return {
        "label": comparison.servers[run.server_index].label,
        "address": comparison.servers[run.server_index].endpoint.address,
        "server_index": run.server_index,
        "number": run.number,
        "seed": run.seed,
        "probe": None if run.probe is None else vars(run.probe),
        "blocks_freed": run.blocks_freed,
        "figures": run.figures,
        "skipped": run.skipped,
        "doubts": run.doubts,
    }


def _summary_object(comparison: Comparison, summary: Summary) -> dict[str, object]:
    server = comparison.servers[summary.server_index]
    return {"label": server.label, "address": server.endpoint.address, **vars(summary)}
