"""`polychip bench control` at its smallest; a step costs the same however much is there."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.cli import bench_control
from scripts.cli.bench_output import ends_at_interrupt
from scripts.cli.main import main
from scripts.control_cost import costs
from scripts.control_cost.peer import PeerFailed
from scripts.control_cost.simulated_plane import SimulatedPlane

ROOT = Path(__file__).parents[2]
SMALL = ["--groups", "1,3", "--blocks", "50", "--rows", "4", "--steps", "5"]
STAGES = ["plan", "encode", "transport", "apply"]
STEPS = 64


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "control", *arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command's result, and the JSON it wrote beside its tables."""
    path = tmp_path_factory.mktemp("control") / "costs.json"
    result = bench(*SMALL, "--seed", "7", "--json", str(path))
    assert result.exit_code == 0, result.output
    return result, json.loads(path.read_text())


def test_json_has_every_stage_of_every_point(measured):
    _, found = measured
    assert set(found) == {
        *("date", "polychip", "machine", "quick", "rows", "steps", "seed", "budget_us"),
        *("step_costs", "stream_costs", "route_costs"),
    }
    assert {"processor", "cores", "python"} <= set(found["machine"])
    facts = [found[name] for name in ("quick", "rows", "steps", "seed", "budget_us")]
    assert facts == [False, 4, 5, 7, 1000]
    points = [(cost["groups"], cost["cached_blocks"]) for cost in found["step_costs"]]
    assert points == [(1, 50), (3, 50)]
    for cost in found["step_costs"]:
        assert list(cost["stages"]) == STAGES
        for times in cost["stages"].values():
            assert 0 < times["median_us"] <= times["p99_us"]
        total_us = sum(times["median_us"] for times in cost["stages"].values())
        assert cost["total_us"] == pytest.approx(total_us)
        assert cost["budget_share"] == pytest.approx(total_us / 1000)


def test_json_has_every_kind_of_stream(measured):
    _, found = measured
    kinds = [(cost["protocol"], cost["tokens_at_once"]) for cost in found["stream_costs"]]
    assert kinds == [("http", 1), ("http", 8), ("grpc", 1), ("grpc", 8)]
    for cost in found["stream_costs"]:
        # More only if the clients' process got no turn for long.
        assert cost["tokens_per_event"] >= cost["tokens_at_once"]
        assert cost["detokenize_us_per_token"] > 0
        assert cost["stream_us_per_event"] > 0


def test_json_has_every_number_of_frontends(measured):
    _, found = measured
    assert [cost["frontends"] for cost in found["route_costs"]] == [1, 2, 4]
    for cost in found["route_costs"]:
        assert 0 < cost["median_us"] <= cost["p99_us"]


def test_tables_have_a_row_for_each(measured):
    result, found = measured
    lines = [line.split() for line in result.stdout.splitlines()]
    for cost in found["step_costs"]:
        start = [str(cost["groups"]), str(cost["cached_blocks"])]
        end = [f"{cost['total_us']:.0f}", f"{cost['budget_share']:.0%}"]
        # A row of another table may begin alike, with a time.
        steps = [line for line in lines if line[:2] == start and line[-1].endswith("%")]
        assert [line[-2:] for line in steps] == [end]
    assert [line[0] for line in lines if line[:1] in (["HTTP"], ["gRPC"])] == [
        *("HTTP", "HTTP", "gRPC", "gRPC")
    ]
    for cost in found["route_costs"]:
        row = [str(cost["frontends"]), f"{cost['median_us']:.0f}", f"({cost['p99_us']:.0f})"]
        assert row in lines
    assert "3 groups, 50 cached blocks: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--groups", "0"], "'0' is no whole number from 1 to 256"),
        (["--groups", "1,,2"], "'' is no whole number from 1 to 256"),
        (["--blocks", "1e3"], "'1e3' is no whole number from 1 to 1000000"),
        (["--blocks", "-5"], "'-5' is no whole number"),
        (["--rows", "0"], "not in the range 1<=x<=1024"),
        (["--steps", "none"], "not a valid integer"),
        (["--groups", "200", "--rows", "1000"], "200 groups of 1000 rows are more than 65536"),
        (["--plot", "costs.gif"], "does not end in one of .png, .svg, .pdf"),
        (["--json", "no/such/folder.json"], "is no file in a folder that exists"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(arguments, reason, monkeypatch):
    monkeypatch.setattr(bench_control, "measure", lambda *_: pytest.fail("it measures"))
    result = bench(*arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_quick_takes_fewer_steps_unless_they_are_told(monkeypatch):
    extents = []

    def note(extent, _):
        extents.append(extent)
        raise PeerFailed("noted")

    monkeypatch.setattr(bench_control, "measure", note)
    for arguments in ([], ["--quick"], ["--quick", "--steps", "9", "--groups", "2,2,5"]):
        result = bench(*arguments)
        assert (result.exit_code, "noted" in result.stderr) == (1, True)
    assert extents[0] == costs.FULL
    assert extents[1] == costs.QUICK
    assert (extents[2].steps, extents[2].groups) == (9, (2, 5))
    assert extents[2].blocks == costs.QUICK.blocks


def test_workers_that_do_not_come_are_an_error(monkeypatch):
    monkeypatch.setattr("scripts.control_cost.step_transport.WORKERS", "scripts.no_such_module")
    monkeypatch.setattr("scripts.control_cost.step_transport.ATTACH_DEADLINE_S", 0.1)
    result = bench(*SMALL, "--steps", "1")
    assert result.exit_code == 1
    assert "workers in a process of their own did not answer" in result.stderr


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, the extra `plot`, is not installed")
    path = tmp_path / "costs.png"
    result = bench("--groups", "1", *SMALL[2:], "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "scripts.control_cost.plot", raising=False)
    result = bench("--plot", str(tmp_path / "costs.png"))
    assert result.exit_code == 1
    assert "-m pip install matplotlib" in result.stderr


@pytest.mark.parametrize("later_s", [0.0, 1.5])
def test_ctrl_c_ends_it_with_one_line(later_s):
    command = [sys.executable, "-m", "scripts.cli.main", "bench", "control", "--steps", "40"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        first = process.stderr.readline()  # something is measured
        time.sleep(later_s)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert "sending and receiving" in first
    assert process.returncode == 130, errors
    assert output == ""
    assert errors.splitlines()[-1] == "Interrupted; nothing is shown of what was measured."
    assert "Traceback" not in errors


class Dropping:
    """Is interrupted while it is cleared away, where Python drops that."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_python_drops_comes_again(capsys):
    hook = sys.unraisablehook

    def measure():
        with ends_at_interrupt():
            Dropping()
            time.sleep(60)

    with pytest.raises(SystemExit) as ended:
        measure()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted; nothing is shown of what was measured.\n"
    assert sys.unraisablehook is hook
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# ---------------------------------------------------------------- nothing grows with what is there


class CallCount:
    """Calls of functions, Python's and those written in C, while it is open."""

    def __init__(self):
        self.calls_count = 0

    def __enter__(self):
        sys.setprofile(self._on_event)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _on_event(self, _frame, event, _argument):
        self.calls_count += event in ("call", "c_call")


def calls_of_steps(groups_count, blocks_count):
    """By stage, of as many steps of all groups together."""
    count = CallCount()
    plane = SimulatedPlane(groups_count, blocks_count, 8, STEPS, 5, lambda: count.calls_count)
    assert plane.cached_blocks == blocks_count
    with count:
        plane.run(STEPS)
    assert plane.cached_blocks == blocks_count
    return {stage: sorted(calls[:STEPS]) for stage, calls in plane.samples.items()}


@pytest.mark.parametrize(("few", "many"), [((1, 1_000), (1, 100_000)), ((1, 1_000), (100, 1_000))])
def test_a_step_makes_as_many_calls_however_many_blocks_and_groups_there_are(few, many):
    few, many = calls_of_steps(*few), calls_of_steps(*many)
    assert set(few) == set(many) == {"plan", "encode", "apply"}
    for stage, calls in many.items():
        assert len(calls) == len(few[stage]) == STEPS
        # How many of its rows need a block differs from step to step.
        assert calls[STEPS // 2] <= 1.1 * few[stage][STEPS // 2] + 10, stage
        assert sum(calls) <= 1.2 * sum(few[stage]), stage
