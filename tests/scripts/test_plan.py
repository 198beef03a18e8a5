"""`polychip plan` over stand-in measurements: what it asks, says, advises and refuses."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.calibration.calibration_file import CalibratedSettings, StepTime
from scripts.cli.main import main
from scripts.cli.plan import memory_bytes
from scripts.cli.serve import serve
from scripts.planning import measured
from tests.fakes.calibrations import CALIBRATION

PROGRAM = """
import json, sys

task = json.loads(sys.argv[1])
with open(__LOG__, "a") as log:
    log.write(json.dumps(task) + "\\n")
if __SAYS__ is not None:
    print(__SAYS__)
    sys.exit(__STATUS__)
if task["weights"] == "int8" and task["backend"].startswith("sim"):
    print(json.dumps({"error": "no kernels for weights of 8 bits"}))
    sys.exit(0)

parts = {"auto": 2, "bf16": 2, "int8": 1, "native": 1}[task["weights"]]
groups = [
    {"policies": ["cover"], "ranks": [
        {"weight_bytes": (parts << 30) // size, "block_bytes": (1 << 20) // size,
         "query_heads": 8, "kv_heads": 8}
    ] * size}
    for size in task["sizes"] + task["larger_sizes"]
]
model = {"architecture": "llama", "digest": "digest", "dtype": "bfloat16",
         "weights": task["weights"], "context_tokens": 4096, "kv_windows": [0],
         "groups": groups, "refused": []}
chip = {"free_bytes": 8 << 30, "shared": True, "description": "cores 0", "process_bytes": 1 << 28}
print(json.dumps({"model": model, "chip": chip}))
"""


class Measurements:
    """What the process that measures was told, and what it is to say instead of numbers."""

    def __init__(self, folder: Path) -> None:
        self.program, self.log = folder / "measuring.py", folder / "log"
        self.says(None)

    def says(self, text: str | None, status: int = 0) -> None:
        code = PROGRAM.replace("__LOG__", repr(str(self.log))).replace("__SAYS__", repr(text))
        self.program.write_text(code.replace("__STATUS__", str(status)))

    @property
    def tasks(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(autouse=True)
def measurements(tmp_path, monkeypatch):
    found = Measurements(tmp_path)
    monkeypatch.setattr(measured, "PROGRAM", (str(found.program),))
    return found


@pytest.fixture
def model_path(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def run(model_path, *options):
    return CliRunner().invoke(main, ["plan", "--model", str(model_path), *options])


def command_of(output):
    """The words of the command that is advised."""
    (line,) = (each for each in output.splitlines() if each.startswith("  polychip serve"))
    return shlex.split(line)


def test_chips_at_hand_are_asked_what_they_hold(model_path, measurements):
    result = run(model_path, "--chips", "2", "--block-tokens", "32", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    (task,) = measurements.tasks
    assert task["model"] == str(model_path)
    assert (task["backend"], task["chips_on_host"], task["dtype"]) == ("cpu", 2, "float32")
    assert (task["block_tokens"], task["sizes"]) == (32, [1, 2])
    assert task["larger_sizes"] == [4, 8, 16]
    assert "share 8.00 GiB of free memory" in result.output
    assert "M = 3.88 GiB" in result.output  # Without the memory of a second worker.


def test_chips_to_buy_have_a_memory_of_their_own(model_path, measurements):
    result = run(model_path, "--chip-memory", "1.5GiB", "--chips", "4", "--context", "256")
    assert result.exit_code == 0, result.output
    (task,) = measurements.tasks
    assert task["chips_on_host"] == 1  # One is asked, whatever there is.
    assert "4 of cpu, with 1.50 GiB of free memory each" in result.output
    assert "Take 2 groups of 2 chips" in result.output


def test_the_command_that_is_advised_is_one_that_serve_takes(model_path):
    options = ("--chip-memory", "1.5GiB", "--chips", "4", "--context", "256", "--dtype", "bfloat16")
    result = run(model_path, *options, "--max-running", "8", "--weights", "bf16")
    program, name, *words = command_of(result.output)
    assert (program, name) == ("polychip", "serve")
    values = serve.make_context("serve", words).params
    assert [group.size for group in values["groups"]] == [2, 2]
    assert values["model_path"] == model_path
    assert (values["context_tokens"], values["running_max"]) == (256, 8)
    assert (values["dtype"], values["weights"]) == ("bfloat16", "bf16")


def test_blocks_and_a_backend_are_in_the_command_where_they_must_be(model_path):
    # 2.25 GiB: 256 MiB beside the weights, of which a worker takes 51 by itself.
    result = run(
        model_path, "--chip-memory", "2.25GiB", "--chips", "1", "--context", "1600",
        "--backend", "sim:ideal", "--backend-option", "pace=off",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    values = serve.make_context("serve", command_of(result.output)[2:]).params
    assert values["kv_blocks"] == (100,)
    assert values["backend"] == "sim:ideal"
    assert values["backend_options"] == ("pace=off",)
    assert values["chips"] == 1


def test_nothing_fits_and_the_remedies_are_told(model_path, measurements):
    result = run(model_path, "--chip-memory", "1.2GiB", "--chips", "1", "--context", "256")
    assert result.exit_code == 1
    assert "Nothing fits" in result.output
    assert "--weights int8: 1 group of 1 chip would do" in result.output
    assert "more chips: a group of 2 would do; there are 1" in result.output
    assert [task["weights"] for task in measurements.tasks] == ["auto", "int8", "native"]


def test_weights_the_chips_cannot_hold_are_no_remedy(model_path):
    options = ("--chip-memory", "1.2GiB", "--chips", "1", "--context", "256", "--backend", "sim")
    result = run(model_path, *options)
    assert result.exit_code == 1
    assert "--weights int8" not in result.output
    assert "--weights native: 1 group of 1 chip would do" in result.output


def test_torch_is_left_to_the_process_that_measures():
    code = "import sys, scripts.cli.plan; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'scripts.planning.plan'" in done.stdout
    assert "'torch'" not in done.stdout


def test_json_has_everything(model_path):
    result = run(model_path, "--chip-memory", "4GiB", "--chips", "2", "--json")
    values = json.loads(result.stdout)
    assert [(each["groups"], each["size"]) for each in values["layouts"]] == [(2, 1), (1, 2)]
    assert values["advice"]["groups"] == 2
    assert values["advice"]["command"].startswith("polychip serve")
    assert values["weights_over_memory"] == 0.5
    assert values["shortage"] is None
    none = run(model_path, "--chip-memory", "1GiB", "--chips", "1", "--json")
    assert none.exit_code == 1
    values = json.loads(none.stdout)
    assert values["advice"] is None
    assert values["shortage"]["missing_bytes"] > 1 << 30


def test_a_calibration_gives_speeds_and_settings(model_path, tmp_path):
    path = tmp_path / "calibration.json"
    replace(
        CALIBRATION,
        model_digest="digest",
        group_size=1,
        device="cores 0",
        settings=CalibratedSettings(chunk_tokens=128, running_max=4),
        step_time=StepTime(0.01, 0.001, 0.0, 0.01, 0.0),
        points=(),
    ).write(path)
    result = run(model_path, "--chips", "1", "--calibration", str(path))
    assert result.exit_code == 0, result.output
    row = next(line for line in result.output.splitlines() if line.startswith("1 "))
    # 1.2 GiB of KV: 4 requests of 256 blocks, in steps of 10 + 4 x 10 ms; chunks of 138 ms.
    assert "50.0 ms" in row
    assert "80" in row.split()[-3]
    assert row.split()[-1].startswith("928")
    values = serve.make_context("serve", command_of(result.output)[2:]).params
    assert (values["chunk_tokens"], values["running_max"]) == (128, 4)
    # What is asked for comes before what was calibrated.
    result = run(model_path, "--chips", "1", "--calibration", str(path), "--max-running", "2")
    assert "30.0 ms" in result.output
    path.write_text("{}")
    broken = run(model_path, "--calibration", str(path))
    assert broken.exit_code == 2
    assert f"--calibration {path}: " in broken.output


def test_remedies_are_for_the_wishes_of_the_calibration(model_path, tmp_path):
    """33 requests are more than a group computes at once, unless the calibration says so."""
    path = tmp_path / "calibration.json"
    settings = CalibratedSettings(chunk_tokens=128, running_max=64)
    replace(CALIBRATION, model_digest="digest", group_size=1, settings=settings).write(path)
    chips = ("--chip-memory", "1.3GiB", "--chips", "1", "--context", "16")
    result = run(model_path, *chips, "--requests", "33", "--calibration", str(path))
    assert result.exit_code == 1
    assert "--weights int8: 1 group of 1 chip would do" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "none"], "no backend 'none'"),
        (["--backend", "sim", "--backend-option", "chips=2", "--chips", "3"], "finds 2"),
        (["--chip-memory", "24 apples"], "is not a size"),
        (["--chip-memory", "24"], "'24' is 24 bytes, and a chip has at least 1048576; write"),
        (["--chip-memory", "24k"], "such as 24GiB"),
        (["--devices", "cpu=0"], "write ids alone"),
        (["--requests", "33"], "--max-running"),
    ],
)
def test_what_cannot_be_planned_is_refused(model_path, options, message):
    result = run(model_path, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("says", "status", "message"),
    [
        ('{"error": "model.gguf: tensor token_embd.weight is missing"}', 0, "is missing"),
        ("", 3, "ended with status 3"),
    ],
)
def test_what_cannot_be_measured_is_an_error(model_path, measurements, says, status, message):
    measurements.says(says, status)
    result = run(model_path, "--chips", "1")
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("24GiB", 24 << 30), ("24G", 24 << 30), ("24g", 24 << 30), ("24gib", 24 << 30)),
        *(("80 GB", 80 * 10**9), ("80gb", 80 * 10**9), ("1.5MiB", 3 << 19)),
        *(("1048576", 1 << 20), ("2000000b", 2 * 10**6)),
    ],
)
def test_sizes_are_read_in_their_units(text, size):
    assert memory_bytes(text) == size
