"""How far a calibration is, on standard error: a bar on a terminal, else a line for each part."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typing_extensions import override

from scripts.calibration.sweep import Watcher

REFRESHES_PER_S = 2
"""Drawing takes time of the machine that is measured."""


@contextmanager
def watching(console: Console) -> Iterator[Watcher]:
    """The watcher that suits the console."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    ) as progress:
        yield _Bar(progress)


class _Bar(Watcher):
    """Tokens computed, of all."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting the workers", total=None)

    @override
    def on_begin(self, tokens_count: int, prefill_tokens_per_s: float) -> None:
        self._progress.update(self._task, total=tokens_count)

    @override
    def on_next(self, part: str, what: str = "") -> None:
        self._progress.update(self._task, description=f"{part}: {what}" if what else part)

    @override
    def on_step(self, tokens_count: int) -> None:
        self._progress.advance(self._task, tokens_count)


class _Lines(Watcher):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._part = ""

    @override
    def on_begin(self, tokens_count: int, prefill_tokens_per_s: float) -> None:
        self._say(
            f"{tokens_count} tokens are to be computed: at the {prefill_tokens_per_s:.0f} tokens/s "
            f"of the warm-up {tokens_count / prefill_tokens_per_s:.0f} s"
        )

    @override
    def on_next(self, part: str, what: str = "") -> None:
        if part != self._part:
            self._part = part
            self._say(part)

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)
