"""`polychip bench step` on tiny models, each in a process of its own: it takes a chip's cores."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from scripts.cli.main import main
from scripts.step_cost.costs import OTHER, Calls, Costs, Extent, Load, StepCost, measure_load
from scripts.step_cost.report import columns, remarks, share_of_memory
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.tiny_gemma import TinyGemma

SMALL = ["--rows", "1,3", "--chunks", "20", "--context", "30", "--repeats", "2"]
KERNELS = {"linear", "attention", "write_kv", "rotary", "logits", "embedding"}


def bench(*arguments):
    command = [sys.executable, "-m", "scripts.cli.main", "bench", "step", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_load_is_measured_and_its_operations_are_named(tmp_path):
    path = write_hugging_face(tmp_path / "model", TinyLlama())
    file = tmp_path / "costs.json"
    result = bench(*SMALL, "--model", path, "--dtype", "float32", "--json", str(file))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "Time by operation" in result.stdout
    check(json.loads(file.read_text()), layers=2)


def test_models_with_windows_are_measured_too_and_json_stands_alone(tmp_path):
    path = write_hugging_face(tmp_path / "model", TinyGemma(layers=6, head_size=8))
    result = bench(*SMALL, "--model", path, "--dtype", "float32", "--json")
    assert result.returncode == 0, result.stderr
    check(json.loads(result.stdout), layers=6)


def check(found, layers):
    loads = [(step["rows"], step["chunk_tokens"]) for step in found["steps"]]
    assert loads == [(1, 0), (3, 0), (0, 20)]
    assert found["chip"]["dtype"] == "float32"
    assert found["weight_bytes"] > 0
    for step in found["steps"]:
        assert step["step_s"] > 0
        assert step["computed_s"] > 0
        assert step["calls"] > 6 * layers
        assert set(step["operation_s"]) >= KERNELS | {OTHER}
        assert sum(step["operation_s"].values()) > 0


def test_a_context_the_model_has_not_is_refused_before_anything_is_measured(tmp_path):
    path = write_hugging_face(tmp_path / "model", TinyLlama())
    result = bench(*SMALL, "--model", path, "--context", "125")
    assert result.returncode == 1
    assert "need a context of 13" in result.stderr
    assert "the model has 128; give a smaller --context" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--backend", "gpu"], "gpu"),
        (["--backend-option", "kernel=x"], "has no option 'kernel'"),
        (["--rows", "0"], "is no whole number from 1"),
    ],
)
def test_wrong_options_are_refused(arguments, says):
    result = CliRunner().invoke(main, ["bench", "step", *SMALL, *arguments])
    assert result.exit_code in (1, 2)
    assert says in result.output


class ScriptedChip:
    """Steps that take so long, one after the other; the first ones warm up."""

    def __init__(self, seconds, calls=None, kernels_ns=()):
        self._seconds = iter(seconds)
        self._calls = calls
        self._kernels_ns = iter(kernels_ns)

    def run(self, _load):
        if self._calls is not None:
            self._calls.taken_ns["linear"] += next(self._kernels_ns)
            self._calls.count += 1
        return next(self._seconds)


def test_medians_leave_the_warm_up_out():
    calls = Calls()
    chip = ScriptedChip([9, 9, 1, 2, 3])
    timed = ScriptedChip([9, 9, 2, 4, 3], calls, [9e9, 9e9, 1e9, 3e9, 2e9])
    cost = measure_load(Load(1), 3, chip, timed, calls)
    assert (cost.step_s, cost.computed_s, cost.calls) == (2, 3, 1)
    assert cost.operation_s == {"linear": 2, OTHER: 1}


def test_small_operations_have_no_column_and_the_largest_comes_first():
    cost = StepCost(Load(1), 1.0, 1.0, {"a": 0.3, "b": 0.6, "c": 0.001, OTHER: 0.099}, 3)
    costs = Costs(Extent([Load(1)], 1, 1), {}, [cost], weight_bytes=10, read_per_s=20.0)
    assert columns(costs) == ["b", "a", OTHER]
    assert share_of_memory(costs, cost) == pytest.approx(0.5)


@pytest.mark.parametrize(("read_per_s", "said"), [(None, None), (20.0, None), (8.0, "125%")])
def test_more_than_all_of_memory_is_explained(read_per_s, said):
    costs = [StepCost(Load(rows), 1.0 * rows, 1.0, {OTHER: 0.1}, 3) for rows in (1, 2)]
    found = remarks(Costs(Extent([Load(1)], 1, 1), {}, costs, 10, read_per_s))
    assert len(found) == (said is not None)
    assert all(said in each and "busier" in each for each in found)
