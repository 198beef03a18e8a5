"""`polychip bench`: the tables of what was measured, and ranks that fail."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from scripts.cli import bench
from scripts.cli.main import main

ROOT = Path(__file__).parents[2]
ROW = {"operation": "all_reduce", "shape": [1, 576], "bytes": 2304}
SMALL = {"messages": 8, "bytes_each": 2048, "apart_us": 50.04, "together_us": 40, "packed_us": 100}
RESULT = {
    "ranks": 2,
    "runs": 5,
    "rows": [{**ROW, "native_us": 8.04, "gloo_us": 160.8, "ratio": 20.0}],
    "small_messages": [{"way": "native", **SMALL}],
}


def printed(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


def test_a_row_names_the_message_and_both_times():
    lines = printed(bench.result_table(RESULT)).splitlines()
    assert lines[0].strip() == "Collectives of 2 ranks, median of 5 runs each"
    assert lines[-2].split() == ["all_reduce", "1", "x", "576", "2304", "8.0", "160.8", "20.0"]


def test_small_messages_are_shown_each_way():
    lines = printed(bench.small_table(RESULT["small_messages"])).splitlines()
    assert lines[0].strip() == "8 sums of 2048 bytes, µs for all"
    assert lines[-2].split() == ["native", "50.0", "40.0", "100.0"]


def test_json_is_what_was_measured(monkeypatch):
    measured = {key: RESULT[key] for key in ("rows", "small_messages")}
    monkeypatch.setattr(bench, "_measure", lambda ranks: measured if ranks == 2 else None)
    result = CliRunner().invoke(main, ["bench", "collectives", "--json"])
    assert json.loads(result.stdout) == RESULT


def test_a_rank_that_fails_is_an_error_with_its_reason(monkeypatch):
    program = "import sys; print('no compiler was there', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(bench, "PROGRAM", [sys.executable, "-c", program])
    result = CliRunner().invoke(main, ["bench", "collectives"])
    assert result.exit_code == 1
    assert "rank 0: no compiler was there" in result.stderr


@pytest.mark.long
def test_shared_memory_is_five_times_faster_and_packing_halves_what_gloo_takes():
    command = [sys.executable, "-m", "scripts.cli.main", "bench", "collectives", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
    result = json.loads(done.stdout)
    ratios = {tuple(row["shape"]): row["ratio"] for row in result["rows"][:6]}
    assert ratios[1, 576] >= 5.0
    small = {measured["way"]: measured for measured in result["small_messages"]}
    assert small["gloo"]["packed_us"] < small["gloo"]["apart_us"] / 2
