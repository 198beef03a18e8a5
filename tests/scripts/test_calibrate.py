"""`polychip calibrate` on real workers: what it measures, writes and says, and how it ends."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from scripts.calibration.calibration_file import Calibration, read_calibration
from scripts.calibration.measurement import measure
from scripts.calibration.recommendation import Rate, recommend
from scripts.cli import calibrate as command
from scripts.cli.main import main
from tests.fakes.checkpoints import TinyLlama, write_hugging_face

ROOT = Path(__file__).parents[2]
SHORT = ("--chunks", "8,32", "--batches", "1,3", "--position", "20", "--repeats", "2")
PATIENCE_S = 120.0
PLOT = "curve.png"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), TinyLlama())


class Measured(NamedTuple):
    result: Result
    calibration: Calibration
    document: dict
    folder: Path


def calibrate(*arguments):
    return CliRunner().invoke(main, ["calibrate", *map(str, arguments)])


@pytest.fixture(scope="module")
def on_cpu(model, tmp_path_factory):
    """The command's result, the settings file and the JSON it wrote; a picture, if it can."""
    folder = tmp_path_factory.mktemp("calibrated")
    output, document = folder / "own.json", folder / "document.json"
    plot = ["--plot", folder / PLOT] if importlib.util.find_spec("matplotlib") else []
    result = calibrate(
        *("--model", model, "--chips", 1, "--dtype", "float32", *SHORT),
        *("--output", output, "--json", document, *plot),
    )
    assert result.exit_code == 0, result.output
    return Measured(result, read_calibration(output), json.loads(document.read_text()), folder)


def test_the_file_says_what_was_measured_and_on_what(on_cpu, model):
    calibration = on_cpu.calibration
    assert calibration.model == model
    assert (calibration.backend, calibration.group_size) == ("cpu", 1)
    assert (calibration.dtype, calibration.weights) == ("float32", "auto")
    assert len(calibration.model_digest) == 64
    assert calibration.kv_blocks > 0
    works = [point.work for point in calibration.points]
    assert [work.chunk_tokens for work in works[:2]] == [8, 32]
    assert [work.decode_rows for work in works[2:4]] == [1, 3]
    assert [work.decode_context for work in works[2:4]] == [21, 63]
    assert all(point.seconds > 0 for point in calibration.points)
    assert any(calibration.step_time.predict(work) > 0 for work in works)


def test_the_recommendation_is_that_of_the_curves(on_cpu):
    _, calibration, document, _ = on_cpu
    chunks = [Rate(row["chunk_tokens"], row["tokens_per_s"]) for row in document["chunks"]]
    batches = [Rate(row["rows"], row["tokens_per_s"]) for row in document["batches"]]
    assert calibration.settings == recommend(chunks, batches, document["rows_held"]).settings


def test_json_has_the_settings_file_and_the_curves(on_cpu):
    _, calibration, document, _ = on_cpu
    assert document["calibration"] == json.loads(json.dumps(calibration.content()))
    assert (document["prompt_tokens"], document["position"]) == (32, 20)
    for row, point in zip(document["chunks"], calibration.points, strict=False):
        assert row["step_ms"] == pytest.approx(point.seconds * 1e3)
        assert row["tokens_per_s"] == pytest.approx(row["chunk_tokens"] / point.seconds)


def test_tables_and_lines_are_for_people(on_cpu):
    result, calibration, _, _ = on_cpu
    settings = calibration.settings
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    marked = [row[0] for row in rows if row[-1] == "recommended"]
    assert marked == [str(settings.chunk_tokens), str(settings.running_max)]
    assert (
        f"--chunk-tokens {settings.chunk_tokens} --max-running {settings.running_max}"
        in result.stdout
    )
    assert "polychip serve --settings" in result.stderr
    for part in ("filling KV memory", "first run", "run 2 of 2"):
        assert part in result.stderr.splitlines()


@pytest.mark.parametrize("chips", [("--backend", "sim", "--chips", 2), ("--groups", "2")])
def test_other_makes_and_groups_of_chips_are_measured(chips, model, tmp_path):
    output = tmp_path / "own.json"
    result = calibrate(*chips, "--model", model, *SHORT, "--output", output, "--json")
    assert result.exit_code == 0, result.output
    calibration = read_calibration(output)
    assert (calibration.backend, calibration.group_size) == (
        ("sim", 1) if "sim" in chips else ("cpu", 2)
    )
    assert len(calibration.points) > 4
    # Nothing but JSON goes to standard output.
    assert json.loads(result.stdout)["calibration"]["backend"] == calibration.backend


def test_a_picture_is_drawn(on_cpu):
    pytest.importorskip("matplotlib", reason="matplotlib, the extra `plot`, is not installed")
    assert (on_cpu.folder / PLOT).read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_before_anything_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "scripts.calibration.plot", raising=False)
    result = calibrate("--plot", tmp_path / "curve.png")
    assert result.exit_code == 1
    assert "-m pip install matplotlib" in result.stderr


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--chunks", "0"], "'0' is no whole number from 1 to 65536"),
        (["--batches", "2000"], "'2000' is no whole number from 1 to 1024"),
        (["--position", "0"], "not in the range"),
        (["--repeats", "101"], "not in the range"),
        (["--model", "no/such/model"], "there is no file or folder 'no/such/model'"),
        (["--groups", "0"], "'0' is not a group"),
        (["--backend", "none-such"], "--backend none-such"),
        (["--output", "no/such/folder.json"], "is no file in a folder that exists"),
        (["--output", "/dev/null"], "'/dev/null' cannot be written: it is no regular file"),
        (["--output", "/proc/x.json"], "'/proc/x.json' cannot be written: No such file"),
        (["--json=/proc/x.json"], "'/proc/x.json' cannot be written: No such file"),
        (["--plot", "/proc/x.png"], "'/proc/x.png' cannot be written: No such file"),
        (["--plot", "curve.gif"], "does not end in one of .png, .svg, .pdf"),
    ],
)
def test_nonsense_is_refused_before_anything_is_started(arguments, reason, monkeypatch):
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("it measures"))
    result = calibrate(*arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_files_that_cannot_be_written_in_the_end_cost_no_results(model, tmp_path, monkeypatch):
    """The place was tried first; since then it went."""
    folder = tmp_path / "folder"
    folder.mkdir()
    output, document = folder / "own.json", folder / "document.json"

    def measure_and_remove_folder(*arguments):
        folder.rmdir()
        return measure(*arguments)

    monkeypatch.setattr(command, "measure", measure_and_remove_folder)
    result = calibrate(
        *("--model", model, "--chips", 1, "--backend", "sim", "--backend-option", "pace=off"),
        *(*SHORT, "--output", output, "--json", document),
    )
    assert result.exit_code == 1, result.output
    assert "Recommended: --chunk-tokens" in result.stdout
    assert str(output) in result.stderr.splitlines()[-1]


def test_a_model_that_does_not_load_ends_it_with_the_reason(model, tmp_path, capfd):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((Path(model) / "config.json").read_text())
    (broken / "model.safetensors").write_bytes(b"short")
    output = tmp_path / "own.json"
    result = calibrate("--model", broken, "--chips", 1, *SHORT, "--output", output)
    assert result.exit_code == 1
    assert "chip0 ended with status 8 (MODEL_FAILED); its log, above, says why" in result.stderr
    assert "model.safetensors: not a readable safetensors file" in capfd.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param("error@launch=300", "chip0: ", marks=pytest.mark.long),
        ("fail@open", "chip0 is unavailable: "),
    ],
)
def test_a_chip_that_fails_ends_it_with_the_reason(fault, reason, model, tmp_path):
    output = tmp_path / "own.json"
    result = calibrate(
        *("--backend", "sim", "--backend-option", f"faults={fault}", "--backend-option"),
        *("pace=off", "--chips", 1, "--model", model, *SHORT, "--output", output),
    )
    assert result.exit_code == 1, result.output
    assert f"Error: {reason}" in result.stderr
    assert not output.exists()


def test_a_step_that_never_ends_is_given_up(model, tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.calibration.measured_group.DEADLINE_MARGIN_S", 0.0)
    monkeypatch.setattr("scripts.calibration.measured_group.LEAVE_S", 0.5)
    monkeypatch.setattr("scripts.calibration.measured_group.TERMINATE_S", 0.5)
    result = calibrate(
        *("--backend", "sim", "--backend-option", "faults=hang@launch=300", "--chips", 1),
        *("--model", model, *SHORT, "--output", tmp_path / "own.json", "--step-deadline", "2"),
    )
    assert result.exit_code == 1, result.output
    assert "a step took more than 2 s; allow more with --step-deadline" in result.stderr


def children_of(pid):
    """Ids of the processes that a process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile.
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Running:
    """The command in a process of its own, on far more steps than anybody waits for."""

    def __init__(self, model, output):
        arguments = [sys.executable, "-m", "scripts.cli.main", "calibrate", "--model", model]
        arguments += ["--chips", "1", "--repeats", "100", "--output", str(output)]
        self.process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def wait_for(self, text):
        """Reads standard error until a line has this; then returns the workers' process ids."""
        while text not in self.process.stderr.readline():
            assert self.process.poll() is None
        deadline = time.monotonic() + PATIENCE_S
        while not (workers := children_of(self.process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return workers

    def end(self):
        """Waits until it ends; what it printed meanwhile."""
        return self.process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("when", [pytest.param("chip0", marks=pytest.mark.long), "first run"])
def test_ctrl_c_leaves_neither_a_process_nor_a_file(when, model, tmp_path):
    """While the worker starts, and while steps are computed."""
    with Running(model, tmp_path / "own.json") as running:
        workers = running.wait_for(when)
        running.process.send_signal(signal.SIGINT)
        printed, errors = running.end()
    assert running.process.returncode == 130, errors
    assert printed == ""
    assert errors.splitlines()[-1] == "Interrupted; nothing is shown of what was measured."
    assert "Traceback" not in errors
    assert all(is_gone(pid) for pid in workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_worker_that_is_killed_ends_it_with_the_reason(model, tmp_path):
    with Running(model, tmp_path / "own.json") as running:
        (worker,) = running.wait_for("first run")
        os.kill(worker, signal.SIGKILL)
        _, errors = running.end()
    assert running.process.returncode == 1
    assert "Error: chip0 was ended by SIGKILL" in errors
    assert list(tmp_path.iterdir()) == []
