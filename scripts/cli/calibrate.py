"""`polychip calibrate`: which chunk size and batch suit these chips and this model."""

import json
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console

from scripts.calibration.measured_group import CalibrationFailed
from scripts.calibration.measurement import Measurement, measure
from scripts.calibration.report import batch_table, chunk_table, document, summary
from scripts.calibration.sweep import Extent
from scripts.calibration.watching import watching
from scripts.cancellable import run_cancellable
from scripts.cli.bench_output import (
    drawing,
    ends_at_interrupt,
    numbers_up_to,
    output_options,
    put_out,
    tables_console,
    unwritable,
)
from scripts.cli.output_files import replaced_file
from scripts.cli.serve import settings_of
from scripts.cli.serve_options import calibrated_options
from scripts.cli.serving_chips import chip_table, look_at_chips, settle_backends
from scripts.control_cost.quiet_logs import quiet_logs
from scripts.settings import ServeSettings

CHUNK_MAX = 65_536
BATCH_MAX = 1024
POSITION_MAX = 1 << 20
REPEATS_MAX = 100

Draw = Callable[[Measurement, Path], None]


@click.command(
    context_settings={"show_default": True, "max_content_width": 100},
    short_help="Measures which chunk size and batch suit these chips, for `serve --settings`.",
)
@calibrated_options
@click.option(
    "--chunks",
    type=numbers_up_to(CHUNK_MAX),
    default="64,128,256,512,1024,2048",
    metavar="N,N,...",
    help="Sizes of chunks that are measured, in prompt tokens.",
)
@click.option(
    "--batches",
    type=numbers_up_to(BATCH_MAX),
    default="1,2,4,8,16,32,64",
    metavar="N,N,...",
    help="Numbers of rows that decode in a step.",
)
@click.option(
    "--position",
    type=click.IntRange(1, POSITION_MAX),
    default=256,
    help="Tokens, prompt and output together, that such a row has behind it.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, REPEATS_MAX),
    default=5,
    help="How often each step is measured; medians are taken.",
)
@click.option(
    "--output",
    "output_path",
    type=replaced_file,
    default="calibration.json",
    metavar="FILE",
    help="Settings file that is written, for `polychip serve --settings` and `polychip plan`.",
)
@output_options
def calibrate(
    chunks: tuple[int, ...],
    batches: tuple[int, ...],
    position: int,
    repeats: int,
    output_path: Path,
    json_path: str | None,
    plot_path: Path | None,
    **values: object,
) -> None:
    """Starts a group of chips as `polychip serve` does, measures its steps, recommends settings and
    writes them to a file.

    \b
    --chunk-tokens  the smallest chunk with 80 % of the best prefill throughput
    --max-running   the least rows with 80 % of the best decode throughput, and no
                    more than 80 % of what KV memory holds

    Where the options name several groups, the first one is measured, alone. Do not serve on the
    same chips meanwhile.
    """
    started = datetime.now(timezone.utc)
    draw: Draw | None = None if plot_path is None else drawing("scripts.calibration.plot")
    own = {"tokenizer_threads": None, "join_token_file": None, "api_key_file": None}
    settings, tried = settle_backends(settings_of({**values, **own}))
    for line in (f"Polychip {version('polychip')}", *tried, *_chips(settings)):
        click.echo(line, err=True)
    extent = Extent(tuple(sorted(chunks)), tuple(sorted(batches)), position, repeats)
    measured = _measured(settings, extent, started)
    content = json.dumps(document(measured), indent=2)
    try:
        # First what is printed: minutes of measuring are not lost with a file.
        put_out(content, json_path, lambda: _show(measured))
    finally:
        with unwritable():
            measured.calibration.write(output_path)
    if draw is not None and plot_path is not None:
        with unwritable():
            draw(measured, plot_path)
    for remark in measured.remarks:
        click.echo(f"Note: {remark}.", err=True)
    click.echo(
        f"Written: {output_path}; use it with `polychip serve --settings {output_path}`.", err=True
    )


def _chips(settings: ServeSettings) -> list[str]:
    """The chips of the first group."""
    head, *chips = chip_table(settings, look_at_chips(settings))
    return ["", head, *chips[: settings.group_sizes[0]], ""]


def _measured(settings: ServeSettings, extent: Extent, started: datetime) -> Measurement:
    errors = Console(stderr=True, highlight=False)
    try:
        with ends_at_interrupt(), quiet_logs(), watching(errors) as watcher:
            return run_cancellable(measure(settings, extent, watcher, started))
    except CalibrationFailed as error:
        raise click.ClickException(str(error)) from error


def _show(measured: Measurement) -> None:
    console = tables_console()
    console.print(chunk_table(measured))
    console.print(batch_table(measured))
    for line in summary(measured):
        console.print(line, soft_wrap=True, markup=False)
