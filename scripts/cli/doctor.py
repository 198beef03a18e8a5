"""`polychip doctor`: what a backend's chips are, whether they work, and whether they conform.

options --> backend (no torch) --> checkup in child processes --> conformance suite --> report
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backends.errors import BackendError
from backends.plugin import AUTO, BackendConfig, ready_backend
from scripts.checkup import Patient, Say, examine
from scripts.cli.bench_output import STANDARD_OUTPUT, json_target, unwritable
from scripts.cli.chip_options import device_lists, options_of
from scripts.cli.output_files import output_file
from scripts.conformance import (
    OUTCOMES,
    Case,
    SuiteUnavailable,
    check_suite,
    markdown,
    run_suite,
    signed,
    summary,
)
from scripts.text_table import text_table


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option(
    "--backend",
    default="cpu",
    envvar="POLYCHIP_BACKEND",
    show_envvar=True,
    help="NAME, NAME:VARIANT, or auto for the first that can serve here.",
)
@click.option(
    "--backend-option",
    "backend_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Setting of the backend; may be repeated.",
)
@click.option("--devices", metavar="ID,ID,...", help="Ids or names of the chips; all without it.")
@click.option("--conformance", is_flag=True, help="Run the conformance suite too: minutes.")
@click.option("--long", "long_suite", is_flag=True, help="Run the suite at full size.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    help="Seconds each probe may take.",
)
@click.option(
    "--json",
    "json_path",
    type=json_target,
    metavar="FILE",
    help="File that receives the report as JSON; - is standard output, alone.",
)
@click.option(
    "--report",
    "report_path",
    type=output_file,
    metavar="FILE",
    help="File that receives the report as Markdown.",
)
def doctor(
    backend: str,
    backend_options: tuple[str, ...],
    devices: str | None,
    conformance: bool,
    long_suite: bool,
    deadline_s: float,
    json_path: str | None,
    report_path: Path | None,
) -> None:
    """Examines the chips of a backend: devices, kernels, collectives.

    Exit status 1 if anything failed.
    """
    # Human text gives way to JSON on standard output.
    to_errors = json_path == STANDARD_OUTPUT

    def say(line: str = "") -> None:
        click.echo(line, err=to_errors)

    if conformance:
        try:
            check_suite()
        except SuiteUnavailable as error:
            raise click.ClickException(str(error)) from error
    patient = find_patient(backend, devices, backend_options, say)
    report = examine(patient, deadline_s, say)
    if conformance:
        report["conformance"] = run_conformance(patient, say, long_suite, to_errors)
        if report["conformance"]["failures"]:
            report["outcome"] = "failed"
    complete = signed(report)
    with unwritable():
        if report_path is not None:
            report_path.write_text(markdown(complete), encoding="utf-8")
        if json_path is not None:
            with click.open_file(json_path, "w", encoding="utf-8") as file:
                file.write(json.dumps(complete, indent=2, ensure_ascii=False) + "\n")
    say(f"{report['outcome']}; SHA-256 of the report: {complete['sha256']}")
    sys.exit(0 if report["outcome"] == "passed" else 1)


def find_patient(
    name: str, devices: str | None, backend_options: Sequence[str], say: Say
) -> Patient:
    """The backend after `on_init`, and its chips. Raises UsageError with its own error."""
    ids = () if devices is None else device_lists(devices).get("", ())
    if devices is not None and not ids:
        raise click.UsageError("--devices: one backend is examined, so write ids alone: 0,1,5")
    config = BackendConfig(
        chip_indices=(),
        devices=ids,
        chips_on_host=max(1, len(ids)),
        options=options_of(name, backend_options),
    )
    try:
        found = ready_backend(name, config)
        if name == AUTO:
            for other, reason in found.rejected:
                say(f"backend {other} was not taken: {reason}")
            say(f"backend {found.name} was taken")
        return Patient(found.name, found.backend, config, found.backend.select_chips(config))
    except (BackendError, ImportError) as error:
        raise click.UsageError(f"--backend {name}: {error}") from error


def run_conformance(patient: Patient, say: Say, long: bool, to_errors: bool) -> dict[str, Any]:
    """The suite with a bar of progress, its counts and failures."""
    columns = (TextColumn("Conformance"), BarColumn(), MofNCompleteColumn())
    elapsed, failed = TimeElapsedColumn(), TextColumn("{task.fields[failed]} failed")
    with Progress(*columns, failed, elapsed, console=Console(stderr=to_errors)) as progress:
        bar = progress.add_task("", total=None, failed=0)
        failures: list[Case] = []

        def on_progress(done: int, count: int, case: Case) -> None:
            if case.outcome == "failed":
                failures.append(case)
                progress.console.print(f"FAILED {case.id}", markup=False, highlight=False)
            progress.update(bar, total=count, completed=done, failed=len(failures))

        cases = run_suite(patient.name, patient.config.options, on_progress, long)
    found = summary(cases, patient.backend.capabilities.unsupported)
    rows = [("operation", "dtype", *OUTCOMES)]
    rows += [
        (each["operation"], each["dtype"], *(str(each[name]) for name in OUTCOMES))
        for each in found["operations"]
    ]
    for line in text_table(rows):
        say(f"  {line}")
    for failure in found["failures"]:
        say(f"FAILED {failure['id']}: {failure['message'].strip().splitlines()[-1]}")
    say(", ".join(f"{count} {name}" for name, count in found["total"].items()))
    return found
