"""`polychip bench compare`: one load against one or several servers, in turn."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple
from urllib.parse import urlsplit

import click
from rich.console import Console

from control_plane.errors import ConfigurationError
from scripts.cancellable import run_cancellable
from scripts.cli.bench_output import (
    drawing,
    ends_at_interrupt,
    output_options,
    put_out,
    tables_console,
    unwritable,
)
from scripts.cli.common import Unreachable, sendable_key
from scripts.cli.serve_options import ModelPath
from scripts.workloads.comparison import Comparison, Run, WorkloadFailed
from scripts.workloads.prompts import PromptMaker, PromptsUnusable
from scripts.workloads.report import document, machine_line, remarks, result_table
from scripts.workloads.server import ServerUnreachable, ServerUnusable, look_at
from scripts.workloads.watching import watching
from scripts.workloads.workload import QUICK_WORKLOADS, WORKLOADS

SEEDS = 1 << 31
LABELLED = re.compile(r"([^:/=]+)=(.*)")

Draw = Callable[[Comparison, Sequence[Run], Path], None]


class NamedAddress(NamedTuple):
    """label: empty if the address has none."""

    label: str
    address: str

    @property
    def shown(self) -> str:
        """What results call it."""
        return self.label or self.address


def named_address(text: str) -> NamedAddress:
    """An address as http://HOST:PORT, with or without /v1, and NAME= before it if it has one."""
    named = LABELLED.fullmatch(text)
    label, address = named.groups() if named else ("", text)
    parts = urlsplit(address)
    try:
        parts.port  # noqa: B018 - reading it checks it
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{text!r} is no address such as http://127.0.0.1:8000")
    return NamedAddress(label, address)


def told_apart(
    _context: click.Context, _parameter: click.Parameter, addresses: tuple[NamedAddress, ...]
) -> tuple[NamedAddress, ...]:
    """Each server has a name of its own in the results."""
    for shown, count in Counter(each.shown for each in addresses).items():
        if count > 1:
            raise click.BadParameter(
                f"results would call {count} servers {shown!r}; write NAME=ADDRESS with another "
                "NAME for each"
            )
    return addresses


def workload_names(text: str) -> tuple[str, ...]:
    """Names with commas between them, in the order given."""
    names = tuple(dict.fromkeys(part.strip().upper() for part in text.split(",")))
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise click.BadParameter(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    return names


@click.command(short_help="Sends one load to servers in turn, and compares them.")
@click.argument(
    "addresses", metavar="[[NAME=]ADDRESS]...", nargs=-1, type=named_address, callback=told_apart
)
@click.option(
    "--workloads",
    "names",
    type=workload_names,
    default=",".join(WORKLOADS),
    show_default=True,
    metavar="NAME,NAME,...",
    help="Which of them, in which order.",
)
@click.option(
    "--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each."
)
@click.option(
    "--model",
    show_default="the first a server lists",
    help="Name of the model at every address, such as `default`.",
)
@click.option(
    "--tokenizer",
    type=ModelPath(),
    default="default",
    show_default="that of the packaged SmolLM2-135M-Instruct",
    help="The model's tokenizer: a model as `serve --model` takes it, or its tokenizer.json.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    show_default="new each time",
    help="Of the first run's prompts; every further run has the next one.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Answers go on over the model's own end, and are counted by the server; --no-ignore-eos "
    "is for servers that refuse the fields ignore_eos and stream_options.",
)
@click.option(
    "--probe/--no-probe",
    "probes",
    default=None,
    show_default="yes, unless --quick",
    help="Measure before each run what this machine's cores and memory give now: about a second, "
    "256 MiB.",
)
@click.option("--quick", is_flag=True, help="A hundredth of the work: to try, not to compare.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Host if no ADDRESS is given.")
@click.option("--http-port", default=8000, show_default=True, help="Port if no ADDRESS is given.")
@click.option(
    "--api-key",
    type=sendable_key,
    metavar="KEY",
    envvar="POLYCHIP_API_KEY",
    show_envvar=True,
    help="Sent to every address.",
)
@output_options
def compare(
    addresses: tuple[NamedAddress, ...],
    names: tuple[str, ...],
    runs: int,
    model: str | None,
    tokenizer: Path,
    seed: int | None,
    ignore_eos: bool,
    probes: bool | None,
    quick: bool,
    host: str,
    http_port: int,
    api_key: str | None,
    json_path: str | None,
    plot_path: Path | None,
) -> None:
    """Measures the servers at ADDRESS..., each as http://HOST:PORT, in turn; any server that
    speaks OpenAI's /v1/completions will do. The results call a server NAME if it has one.

    \b
    W1  one request at a time, 128 tokens in, 128 out
    W2  64 requests, 16 at once, 256 in, 128 out
    W3  as W2 with a common prefix of 512, 64 in, 64 out
    W4  8 requests decode (32 in, 256 out) when one of 3500 arrives

    Every run has new prompts, and begins with a flush of the prefix cache where the server is
    Polychip. Run 1 is made at every address, then run 2, and so on. Ratios are to the first
    address.
    """
    started = datetime.now(timezone.utc)
    draw: Draw | None = None if plot_path is None else drawing("scripts.workloads.plot")
    chosen = QUICK_WORKLOADS if quick else WORKLOADS
    try:
        comparison = Comparison(
            [
                look_at(address, model, api_key, ignore_eos, label)
                for label, address in addresses or [("", f"http://{host}:{http_port}")]
            ],
            {name: chosen[name] for name in names},
            runs,
            SystemRandom().randrange(SEEDS) if seed is None else seed,
            PromptMaker.load(tokenizer),
            probes=not quick if probes is None else probes,
        )
        done = _measured(comparison)
    except ServerUnreachable as error:
        raise Unreachable(str(error)) from error
    except (WorkloadFailed, ServerUnusable, PromptsUnusable, ConfigurationError) as error:
        raise click.ClickException(str(error)) from error
    content = json.dumps(document(comparison, done, started, quick=quick), indent=2)
    put_out(content, json_path, lambda: _show(comparison, done))
    if draw is not None and plot_path is not None:
        with unwritable():
            draw(comparison, done, plot_path)


def _measured(comparison: Comparison) -> list[Run]:
    errors = Console(stderr=True, highlight=False)
    with ends_at_interrupt(), watching(comparison, errors) as watcher:
        return run_cancellable(comparison.measure(watcher))


def _show(comparison: Comparison, runs: Sequence[Run]) -> None:
    console = tables_console()
    console.print(result_table(comparison, runs))
    if line := machine_line(runs):
        console.print(line, highlight=False)
    errors = Console(stderr=True, highlight=False)
    for line in remarks(comparison, runs):
        errors.print(f"Warning: {line}", soft_wrap=True, markup=False)
