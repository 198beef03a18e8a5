"""`polychip bench startup`: from the launch of a server to its first token."""

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from scripts.cancellable import run_cancellable
from scripts.cli.bench_output import ends_at_interrupt, json_option, put_out, tables_console
from scripts.startup import STAGES, StartFailed, StartUp, free_port, start_up
from scripts.titled_table import titled_table
from scripts.workloads.machine import measured_here

RUNS = 5
RUNS_MAX = 1000
PORT = "{port}"
OWN_NAME = "polychip"
OWN_OPTIONS = (
    *("--host", "--http-port", "--grpc-port", "--worker-port", "--announce", "--log-level"),
    *("--api-key-file", "--help", "-h"),
)
"""Of `serve`, which this command sets itself, or which keep it from being asked."""
FIRST_TOKEN, PROCESSOR = "first token", "processor time"

Runs = Sequence[Sequence[StartUp]]
"""By run, then by server: this one first."""


def command_with_port(text: str) -> tuple[str, ...]:
    """A command line that says where its port goes."""
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no command line: {error}") from error
    if not any(PORT in part for part in command):
        raise click.BadParameter(f"{text!r} does not say where the port goes: write {PORT} for it")
    return command


def options_of_serve(
    _context: click.Context, _parameter: click.Parameter, options: tuple[str, ...]
) -> tuple[str, ...]:
    """What the server may be told."""
    for option in options:
        if option.partition("=")[0] in OWN_OPTIONS:
            raise click.BadParameter(
                f"{option.partition('=')[0]} is not for this command: it asks the server at a free "
                "port of 127.0.0.1 without a key, and reads its log; leave it out"
            )
    return options


@click.command(short_help="Measures the time from launching a server to its first token.")
@click.option(
    "--runs",
    "runs_count",
    type=click.IntRange(1, RUNS_MAX),
    default=RUNS,
    show_default=True,
    help="Starts of each server.",
)
@click.option(
    "--against",
    type=command_with_port,
    metavar="COMMAND",
    help=f"Also start another server, in turn; its command line with {PORT} for the port.",
)
@json_option
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED, callback=options_of_serve)
def startup(
    runs_count: int,
    against: tuple[str, ...] | None,
    json_path: str | None,
    serve_options: tuple[str, ...],
) -> None:
    """Starts `polychip serve` time and again, asks it for one token as soon as it answers, and ends
    it. Options of `serve` follow after --, such as

    \b
    polychip bench startup -- --weights native
    polychip bench startup --against "llama-server -m model.gguf --port {port}"

    The first start reads files from the disk that later ones find in memory: it is made once more,
    and not counted.
    """
    started = datetime.now(timezone.utc)
    own = [sys.executable, "-m", "scripts.cli.main", "serve", "--grpc-port", "0"]
    own += ["--worker-port", "0", "--http-port", PORT, "--log-level", "info", *serve_options]
    commands = [own, *([list(against)] if against else [])]
    try:
        with ends_at_interrupt():
            runs = run_cancellable(_measured(commands, runs_count))
    except StartFailed as error:
        raise click.ClickException(str(error)) from error
    content = json.dumps(_document(commands, runs, started), indent=2)
    put_out(content, json_path, lambda: tables_console().print(result_table(commands, runs)))


async def _measured(commands: Sequence[Sequence[str]], runs_count: int) -> Runs:
    console = Console(stderr=True, highlight=False)
    runs: list[list[StartUp]] = []
    with console.status("each server is started once before it counts"):
        for number in range(runs_count + 1):
            starts = [await _start(_name(*each), each[1]) for each in enumerate(commands)]
            if not number:
                continue
            runs.append(starts)
            times = ", ".join(f"{start.first_token_s:.2f} s" for start in starts)
            console.print(f"run {number} of {runs_count}: {times}")
    return runs


async def _start(name: str, command: Sequence[str]) -> StartUp:
    port = free_port()
    launched = [part.replace(PORT, str(port)) for part in command]
    try:
        return await start_up(launched, port)
    except StartFailed as error:
        raise StartFailed(f"{name}, launched as `{shlex.join(launched)}`: {error}") from error


def _name(index: int, command: Sequence[str]) -> str:
    return command[0].rpartition("/")[2] if index else OWN_NAME


def _figures(start: StartUp) -> dict[str, float]:
    """Everything measured of a start, in seconds, by what it is called in the table."""
    return {
        **start.stages_s,
        FIRST_TOKEN: start.first_token_s,
        PROCESSOR: start.processor_s,
    }


def result_table(commands: Sequence[Sequence[str]], runs: Runs) -> Table:
    """A row for every stage; of each server median and spread, and the median of the ratios.

    What was not told of a start is left out; a dash stands where nothing is left.
    """
    title = f"Seconds from the launch, median of {len(runs)} starts (least to most)"
    table = titled_table(title, [""])
    for index, command in enumerate(commands):
        table.add_column(_name(index, command), justify="right")
        if index:
            table.add_column(f"{OWN_NAME} / {_name(index, command)}", justify="right")
    for stage in (*STAGES.values(), FIRST_TOKEN, PROCESSOR):
        told = [_told(stage, [run[index] for run in runs]) for index in range(len(commands))]
        cells = []
        for index, values in enumerate(told):
            cells.append(_spread(list(values.values())))
            if index:
                ratios = [told[0][run] / values[run] for run in told[0].keys() & values.keys()]
                cells.append(f"{median(ratios):.2f}" if ratios else "-")
        table.add_row(stage, *cells)
    return table


def _told(stage: str, starts: Sequence[StartUp]) -> dict[int, float]:
    """By the number of the start, for those that told of this stage."""
    figures = [_figures(start) for start in starts]
    return {number: each[stage] for number, each in enumerate(figures) if stage in each}


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _document(
    commands: Sequence[Sequence[str]], runs: Runs, started: datetime
) -> dict[str, object]:
    return {
        **measured_here(started.isoformat(timespec="seconds")),
        "servers": [
            {
                "name": _name(index, command),
                "command": list(command),
                "starts": [_figures(run[index]) for run in runs],
            }
            for index, command in enumerate(commands)
        ],
    }
