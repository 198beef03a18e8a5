"""How far a comparison is, on standard error: a bar on a terminal, else a line for each run."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import override

from scripts.workloads.comparison import Comparison, Run, Watcher
from scripts.workloads.figures import LABELS, SHOWN

REFRESHES_PER_S = 2
"""Drawing takes time of the machine that is measured."""


@contextmanager
def watching(comparison: Comparison, console: Console) -> Iterator[Watcher]:
    """The watcher that suits the console."""
    if not console.is_terminal:
        yield _Lines(comparison, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    ) as progress:
        yield _Bar(comparison, progress)


class _Bar(Watcher):
    """Requests answered, of all."""

    def __init__(self, comparison: Comparison, progress: Progress) -> None:
        self._comparison = comparison
        self._progress = progress
        self._task = progress.add_task("", total=comparison.requests)

    @override
    def on_workload(self, run: Run, name: str, requests_done: int) -> None:
        place = _place(self._comparison, run)
        self._progress.update(self._task, description=f"{place}: {name}", completed=requests_done)

    @override
    def on_answer(self) -> None:
        self._progress.advance(self._task)

    @override
    def on_run(self, run: Run) -> None:
        pass


class _Lines(Watcher):
    """The first figure of each workload, when a run is complete."""

    def __init__(self, comparison: Comparison, console: Console) -> None:
        self._comparison = comparison
        self._console = console

    @override
    def on_workload(self, run: Run, name: str, requests_done: int) -> None:
        pass

    @override
    def on_answer(self) -> None:
        pass

    @override
    def on_run(self, run: Run) -> None:
        said = []
        for workload, figures in run.figures.items():
            name = SHOWN[workload][0]
            value = figures[name]
            said.append(f"{workload} {'-' if value is None else f'{value:.1f}'} {LABELS[name]}")
        said += [f"{workload} skipped" for workload in run.skipped]
        line = f"{_place(self._comparison, run)}: {', '.join(said)}"
        self._console.print(line, soft_wrap=True, markup=False)


def _place(comparison: Comparison, run: Run) -> str:
    label = comparison.servers[run.server_index].label
    return f"run {run.number} of {comparison.runs_count}, {label}"
