"""`polychip bench`: measures servers under load, and parts of Polychip on this machine."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from scripts.cli.bench_compare import compare
from scripts.cli.bench_control import control
from scripts.cli.bench_startup import startup
from scripts.cli.bench_step import step
from scripts.titled_table import titled_table

PROGRAM = [sys.executable, "-m", "scripts.collective_bench"]
RUNS = 5
RANKS_MAX = 64
TIMEOUT_S = 600.0

Result = Mapping[str, Any]


@click.group()
def bench() -> None:
    """Measures servers under load, and parts of Polychip on this machine."""


bench.add_command(compare)
bench.add_command(control)
bench.add_command(startup)
bench.add_command(step)


@bench.command()
@click.option(
    "--ranks",
    type=click.IntRange(2, RANKS_MAX),
    default=2,
    show_default=True,
    help="Processes that exchange with each other, each a chip of the cpu backend.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def collectives(ranks: int, as_json: bool) -> None:
    """Compares collectives through shared memory with those of gloo.

    Both are measured in turn, five times; the table shows medians.
    """
    with Console(stderr=True).status(f"{ranks} ranks exchange; this takes seconds"):
        result = {"ranks": ranks, "runs": RUNS, **_measure(ranks)}
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    console = Console(highlight=False)
    console.print(result_table(result))
    console.print(small_table(result["small_messages"]))


def _measure(ranks: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [*PROGRAM, str(rank), str(ranks), str(RUNS), folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode != 0:
            raise click.ClickException(f"rank {rank}: {errors.strip().splitlines()[-1]}")
    measured: Result = json.loads(outputs[0][0])
    return measured


def result_table(result: Result) -> Table:
    """A row for every message: its size, the time each way, and how many times faster."""
    title = f"Collectives of {result['ranks']} ranks, median of {result['runs']} runs each"
    numbers = ("Shape (float32)", "Bytes", "Native µs", "gloo µs", "Times faster")
    table = titled_table(title, ["Operation"], numbers)
    for row in result["rows"]:
        table.add_row(
            row["operation"],
            _shape(row["shape"]),
            str(row["bytes"]),
            f"{row['native_us']:.1f}",
            f"{row['gloo_us']:.1f}",
            f"{row['ratio']:.1f}",
        )
    return table


def small_table(measured: Sequence[Result]) -> Table:
    """What several small messages cost one by one, under way together, and packed into one."""
    first = measured[0]
    title = f"{first['messages']} sums of {first['bytes_each']} bytes, µs for all"
    table = titled_table(title, ["Through"], ("One by one", "Together", "Packed in a group"))
    for small in measured:
        times_us = (small["apart_us"], small["together_us"], small["packed_us"])
        table.add_row(small["way"], *(f"{time_us:.1f}" for time_us in times_us))
    return table


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
