"""The worker's process: order of start, exit codes, health."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chip_worker.exit_code import ExitCode
from chip_worker.status_file import FRESH_S, StatusFile, check_status_file

ROOT = Path(__file__).parents[2]
COMMON = ["--worker-id", "chip0", "--control-plane", "127.0.0.1:1", "--model", "absent.gguf"]


def run_worker(*arguments: str, script: tuple[str, ...] = ("-m", "chip_worker")):
    return subprocess.run(
        [sys.executable, *script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )


def test_the_backend_starts_before_torch_and_its_failure_ends_the_process(tmp_path):
    record = tmp_path / "record"
    ended = run_worker(
        *COMMON,
        "--backend=recording",
        "--backend-option=speed=fast",
        script=("tests/fakes/recording_backend.py", str(record)),
    )
    assert record.read_text() == "torch False options {'speed': 'fast'}"
    assert ended.returncode == ExitCode.BACKEND_FAILED
    assert "this chip is only for show" in ended.stderr
    assert "Traceback" in ended.stderr


def test_an_unknown_backend_is_named_with_the_known_ones():
    ended = run_worker(*COMMON, "--backend", "abacus")
    assert ended.returncode == ExitCode.BACKEND_FAILED
    assert "no backend 'abacus'" in ended.stderr
    assert "cpu" in ended.stderr


def test_a_missing_model_has_a_code_of_its_own():
    ended = run_worker(*COMMON)
    assert ended.returncode == ExitCode.MODEL_FAILED
    assert "absent.gguf" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--worker-id", "chip0"], "--control-plane"),
        ([*COMMON, "--kv-blocks", "0"], "--kv-blocks"),
        ([*COMMON, "--backend-option", "speed"], "NAME=VALUE"),
        (["--health"], "--status-file"),
    ],
)
def test_bad_options_are_named(arguments, says):
    ended = run_worker(*arguments)
    assert ended.returncode == 2
    assert says in ended.stderr


def test_health_reads_the_status_file(tmp_path):
    path = tmp_path / "status.json"
    StatusFile(str(path), "chip0", 7, time.time).write("serving", "g0", 3)
    assert json.loads(path.read_text())["incarnation"] == 7
    ended = run_worker("--health", "--status-file", str(path))
    assert (ended.returncode, ended.stdout) == (0, "serving g0\n")
    assert run_worker("--health", "--status-file", str(path) + ".none").returncode == 1


def test_a_status_is_healthy_while_fresh_and_not_failed(tmp_path):
    path = tmp_path / "status.json"
    status = StatusFile(str(path), "chip0", 7, lambda: 1000.0)
    status.write("idle")
    assert check_status_file(str(path), 1000.0 + FRESH_S)[0]
    assert not check_status_file(str(path), 1001.0 + FRESH_S)[0]
    status.write("failed")
    assert not check_status_file(str(path), 1000.0)[0]
    path.write_text("{")
    assert not check_status_file(str(path), 1000.0)[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
