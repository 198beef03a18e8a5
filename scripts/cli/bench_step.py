"""`polychip bench step`: what the steps of a chip cost, operation by operation."""

import importlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console

from backends.errors import BackendError
from backends.plugin import Backend, BackendConfig, find_backend
from chip_worker.config import WorkerConfig
from chip_worker.errors import ModelError
from control_plane.errors import ConfigurationError
from scripts.cli.bench_output import (
    ends_at_interrupt,
    json_option,
    numbers_up_to,
    put_out,
    tables_console,
)
from scripts.cli.chip_options import options_of
from scripts.cli.serve_options import MODEL_OPTIONS
from scripts.control_cost.quiet_logs import quiet_logs
from scripts.step_cost.costs import Costs, Extent, Load, StepFailed
from scripts.step_cost.report import document, operation_table, remarks, step_table
from scripts.workloads.probe import probe_machine

ROWS_MAX = 256
TOKENS_MAX = 4096

Measure = Callable[..., Costs]


@click.command(short_help="Measures the steps of a chip, operation by operation.")
@click.option(
    "--rows",
    type=numbers_up_to(ROWS_MAX),
    default="1,8,16",
    show_default=True,
    metavar="N,N,...",
    help="Requests that decode in a step.",
)
@click.option(
    "--chunks",
    type=numbers_up_to(TOKENS_MAX),
    default="128,512",
    show_default=True,
    metavar="N,N,...",
    help="Tokens of a prompt that a step without decoding computes.",
)
@click.option(
    "--context",
    type=click.IntRange(1, TOKENS_MAX),
    default=300,
    show_default=True,
    help="Tokens each request has before it decodes.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Steps of each kind that count; two more come before them.",
)
@click.option("--backend", default="cpu", show_default=True, help="NAME or NAME:VARIANT.")
@click.option(
    "--backend-option",
    "backend_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Setting of the backend; may be repeated.",
)
@json_option
def step(
    rows: tuple[int, ...],
    chunks: tuple[int, ...],
    context: int,
    repeats: int,
    backend: str,
    backend_options: tuple[str, ...],
    json_path: str | None,
    model_path: Path,
    dtype: str,
    weights: str,
) -> None:
    """Opens one chip in this process and measures its steps without a service around it.

    \b
    Step               as the service runs it: few tokens as one captured program
    Weights, GB/s      the model's weights by the time of a step: each step reads them all
    Of memory          that as a part of what the cores read of memory, probed before
    Called one by one  the same step with a call for every operation
    Between calls      what of that is in no operation: sampling's own part, and the calls

    Times are the host's: of chips that compute while the host goes on, only Step means something.
    """
    started = datetime.now(timezone.utc)
    loads = [*(Load(each) for each in rows), *(Load(0, each) for each in chunks)]
    extent = Extent(loads, context, repeats)
    backend_config = BackendConfig(
        chip_indices=(0,), dtype=dtype, options=options_of(backend, backend_options)
    )
    config = WorkerConfig(
        "chip0", "", str(model_path), backend=backend, dtype=dtype, weights=weights
    )
    with ends_at_interrupt():
        try:
            costs = _measured(extent, config, find_backend(backend), backend_config)
        except (BackendError, ModelError, StepFailed, ConfigurationError) as error:
            raise click.ClickException(str(error)) from error
    content = json.dumps(document(costs, started), indent=2)
    put_out(content, json_path, lambda: _show(costs))
    for remark in remarks(costs):
        click.echo(f"Note: {remark}.", err=True)


for option in reversed(MODEL_OPTIONS):
    option(step)


def _measured(
    extent: Extent, config: WorkerConfig, backend: Backend, backend_config: BackendConfig
) -> Costs:
    backend.on_init(backend_config)
    with Console(stderr=True).status("what memory gives") as status, quiet_logs():
        probe = probe_machine()
        # Imports torch, which some vendors prepare in on_init.
        measure: Measure = importlib.import_module("scripts.step_cost.measurement").measure
        read_per_s = None if probe is None else probe.read_every_gb_per_s * 1e9
        return measure(extent, config, backend, backend_config, read_per_s, status.update)


def _show(costs: Costs) -> None:
    console = tables_console()
    console.print(step_table(costs))
    console.print(operation_table(costs))
