"""The worker's process: order of start, exit codes, health."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import structlog

from backends.cpu.plugin import CpuBackend
from backends.plugin import AutoChoice
from chip_worker.__main__ import start_backend
from chip_worker.config import WorkerConfig
from chip_worker.errors import ConfigurationError
from chip_worker.exit_code import ExitCode
from chip_worker.status_file import FRESH_S, StatusFile, check_status_file
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.scripted_control_plane import ScriptedControlPlane

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


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_hugging_face(tmp_path_factory.mktemp("model"), TinyLlama())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("lost", "the chip fell off the bus"),
        pytest.param("broken", "RuntimeError: vendor error 719", marks=pytest.mark.long),
        pytest.param("hangs", "the chip could not be opened within 1 s", marks=pytest.mark.long),
        ("import-broken", "ImportError: libvendor.so.7"),
        ("import-hangs", "the chip could not be opened within 1 s"),
    ],
)
def test_a_chip_that_cannot_be_opened_is_told_to_the_control_plane(model, tmp_path, how, says):
    status = tmp_path / "status.json"
    with ScriptedControlPlane() as plane:
        ended = run_worker(
            *("--worker-id", "chip1", "--control-plane", f"127.0.0.1:{plane.port}"),
            *("--model", model, "--backend", "chipless", "--devices", "bus1,bus0", "--chip", "1"),
            *("--acquire-deadline", "1", "--status-file", str(status)),
            script=("tests/fakes/chipless_backend.py", how),
        )
        stream = plane.next_stream()
    assert ended.returncode == ExitCode.BACKEND_FAILED, ended.stderr
    assert (stream.hello.worker_id, stream.hello.chip.device_id) == ("chip1", "bus0")
    assert says in stream.hello.unavailable_reason
    assert stream.hello.incarnation
    assert says in stream.read().goodbye.reason
    assert says in ended.stderr
    where = ("Traceback", "open_device", "chipless_runtime.py")
    assert any(each in ended.stderr for each in where), "why, or where it hangs"
    assert check_status_file(str(status), time.time()) == (False, "failed")


def test_weights_that_the_chip_cannot_hold_are_a_bad_option(model):
    """Told to the control plane as what else a chip cannot do; no restart helps."""
    with ScriptedControlPlane() as plane:
        ended = run_worker(
            *("--worker-id", "chip0", "--control-plane", f"127.0.0.1:{plane.port}"),
            *("--model", model, "--backend-option", "kernels=torch", "--weights", "int8"),
        )
        stream = plane.next_stream()
    assert ended.returncode == ExitCode.USAGE, ended.stderr
    says = "--weights is int8, but this chip has no kernels for weights of 8 or 4 bits; choose"
    assert stream.hello.unavailable_reason.startswith(says)
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_auto_tells_what_was_tried_and_is_known_by_its_choice(monkeypatch):
    chosen = AutoChoice("cpu", CpuBackend(), (("xpu", "no driver"), ("cuda", "it finds no chip")))
    monkeypatch.setattr("backends.plugin.choose_backend", lambda _config: chosen)
    config = WorkerConfig("chip0", "here", "m", backend="auto", devices=("7", "4"))
    with structlog.testing.capture_logs() as logs:
        settled, backend, backend_config = start_backend(config)
    assert (settled.backend, backend) == ("cpu", chosen.backend)
    assert backend_config.devices == ("7", "4")
    told = [(log.get("backend"), log.get("reason")) for log in logs]
    assert told == [("xpu", "no driver"), ("cuda", "it finds no chip"), ("cpu", None)]


def test_a_chip_beyond_the_listed_devices_is_refused():
    with pytest.raises(ConfigurationError, match="chip 2 is beyond the 2 devices"):
        WorkerConfig("chip2", "here", "m", chip_indices=(2,), devices=("4", "7"))


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


def test_a_status_file_takes_the_place_of_a_file_alone(tmp_path):
    pipe, file, link = (tmp_path / name for name in ("pipe", "file", "link"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    with pytest.raises(OSError, match="it is no regular file"):
        StatusFile(str(pipe), "chip0", 7, time.time).write("idle")
    StatusFile(str(link), "chip0", 7, time.time).write("idle")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert check_status_file(str(file), time.time())[0]
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]


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
