"""`polychip bench control`: what the control plane costs on this machine."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console
from typing_extensions import override

from scripts.cli.bench_output import (
    drawing,
    ends_at_interrupt,
    numbers_up_to,
    output_options,
    put_out,
    tables_console,
    unwritable,
)
from scripts.control_cost.costs import FULL, QUICK, Costs, Extent, Watcher, measure
from scripts.control_cost.peer import PeerFailed
from scripts.control_cost.quiet_logs import quiet_logs
from scripts.control_cost.report import document, route_table, step_table, stream_table
from scripts.control_cost.simulated_plane import SimulationStuck

GROUPS_MAX = 256
BLOCKS_MAX = 1_000_000
"""Each takes about a kilobyte of memory."""
ROWS_MAX = 1024
REQUESTS_MAX = 65_536
STEPS_MAX = 100_000

Draw = Callable[[Costs, Path], None]


@click.command(short_help="Measures what the control plane costs for each step and token.")
@click.option(
    "--groups",
    type=numbers_up_to(GROUPS_MAX),
    show_default="1,10,100",
    metavar="N,N,...",
    help="Numbers of simulated chip groups.",
)
@click.option(
    "--blocks",
    type=numbers_up_to(BLOCKS_MAX),
    show_default="1000,10000,100000",
    metavar="N,N,...",
    help="Numbers of cached blocks, over all groups together.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, ROWS_MAX),
    default=FULL.rows,
    show_default=True,
    help="Requests that decode on each group, and clients that read.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, STEPS_MAX),
    show_default=str(FULL.steps),
    help="Steps that are measured for each row of the table.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=FULL.seed,
    show_default=True,
    help="Of the made-up prompts and tokens.",
)
@click.option("--quick", is_flag=True, help="Few steps, groups and blocks: to try, not to compare.")
@output_options
def control(
    groups: tuple[int, ...] | None,
    blocks: tuple[int, ...] | None,
    rows: int,
    steps: int | None,
    seed: int,
    quick: bool,
    json_path: str | None,
    plot_path: Path | None,
) -> None:
    """Measures the control plane without chips and without a model: a core with simulated groups,
    each of which decodes, and the real servers with a process of their own at the other end.

    \b
    plan           what the next step computes
    encode         the step as a message
    send, receive  the step to a worker and its result back, over a loopback gRPC stream
    apply          the result decoded, its tokens and blocks counted
    detokenize     a token's text, and whether it ends the answer
    stream         formatted and sent, over HTTP (server-sent events) and gRPC
    route          the tokens of a step sent to frontends instead (--frontends)

    Times are of this process's processors, all its threads together.
    """
    started = datetime.now(timezone.utc)
    draw: Draw | None = None if plot_path is None else drawing("scripts.control_cost.plot")
    usual = QUICK if quick else FULL
    extent = Extent(
        groups or usual.groups, blocks or usual.blocks, rows, steps or usual.steps, seed
    )
    if max(extent.groups) * rows > REQUESTS_MAX:
        raise click.UsageError(
            f"{max(extent.groups)} groups of {rows} rows are more than {REQUESTS_MAX} requests; "
            "give fewer --groups or --rows"
        )
    costs = _measured(extent)
    content = json.dumps(document(costs, started, quick=quick), indent=2)
    put_out(content, json_path, lambda: _show(costs))
    if draw is not None and plot_path is not None:
        with unwritable():
            draw(costs, plot_path)


def _measured(extent: Extent) -> Costs:
    errors = Console(stderr=True, highlight=False)
    try:
        with ends_at_interrupt(), quiet_logs(), _watching(errors) as watcher:
            return measure(extent, watcher)
    except (PeerFailed, SimulationStuck) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _watching(console: Console) -> Iterator[Watcher]:
    """On a terminal a line that changes, elsewhere a line for each part that is measured."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with console.status("") as status:
        yield _Status(status.update)


class _Lines(Watcher):
    def __init__(self, console: Console) -> None:
        self._console = console

    @override
    def on_done(self, what: str, taken_s: float) -> None:
        self._console.print(f"{what}: {taken_s * 1e6:.1f} µs", soft_wrap=True, markup=False)


class _Status(Watcher):
    def __init__(self, update: Callable[[str], None]) -> None:
        self._update = update

    @override
    def on_next(self, what: str) -> None:
        self._update(what)


def _show(costs: Costs) -> None:
    console = tables_console()
    console.print(step_table(costs))
    console.print(stream_table(costs))
    console.print(route_table(costs))
