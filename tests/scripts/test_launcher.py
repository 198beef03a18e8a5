"""The launcher over stand-in processes: what it starts again, what it kills, how it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chip_worker.exit_code import ExitCode
from scripts.launcher import WorkerStarts, was_usable
from scripts.progress import unavailable_lines

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0

PROGRAM = """
import sys
from pathlib import Path
import anyio
from control_plane import child_processes
from scripts import launcher
from scripts.cli.serve import serve, settings_of

folder = Path(sys.argv[1])
fakes = Path.cwd() / "tests" / "fakes"
launcher.control_plane_command = lambda settings, announce: [
    sys.executable, str(fakes / "control_plane_process.py"), str(folder), announce]
launcher.worker_command = lambda settings, index, port: [
    sys.executable, str(fakes / "worker_process.py"), str(folder), f"chip{index}"]
if (folder / "hurried").exists():
    child_processes.PAUSE_S_MIN = launcher.LAST_LEFT_S = 0.2
chips = [] if "--groups" in sys.argv else ["--chips", "2"]
options = [*chips, "--drain-deadline", *sys.argv[2:]]
values = dict(serve.make_context("serve", options).params)
del values["announce"]
running = launcher.Launcher(
    settings_of(values),
    report=lambda line: print(line, flush=True),
    on_ready=lambda addresses: print("READY", flush=True),
)
sys.exit(anyio.run(running.run))
"""


class Running:
    """A launcher in a process of its own, and the folder that steers its stand-ins."""

    def __init__(self, folder: Path, *options: str, drain_deadline_s: float = 5.0) -> None:
        self.folder = folder
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(folder), str(drain_deadline_s), *options],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.output.read_text()

    def pids(self, name: str) -> list[int]:
        path = self.folder / f"{name}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: "READY" in self.text())
        self.wait_for(lambda: bool(self.pids("chip0") and self.pids("chip1")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start_one(*options: str, hurried: bool = False, **limits: float) -> Running:
        """hurried: waits that nobody comes in end soon."""
        if hurried:
            (tmp_path / "hurried").touch()
        started.append(Running(tmp_path, *options, **limits))
        return started[-1]

    yield start_one
    for running in started:
        for name in ("chip0", "chip1"):
            (tmp_path / f"{name}.end").write_text("0")
        running.process.kill()
        running.process.wait()
    (tmp_path / "end").write_text("0")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_sigterm_drains_and_stops_all(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_ready()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(DEADLINE_S) == 0, running.text()
    assert all(gone(pid) for name in ("chip0", "chip1") for pid in running.pids(name))


def test_who_serves_is_told_before_it_is_ready(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    running = start()
    running.wait_until_ready()
    told, _, _ = running.text().partition("READY")
    assert "chip0 x\n" in told


def test_workers_start_before_the_control_plane_listens(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "late").touch()
    (tmp_path / "chip0.end").write_text(str(int(ExitCode.FAILED)))
    running = start()
    running.wait_for(lambda: bool(running.pids("chip0") and running.pids("chip1")))
    running.wait_for(lambda: gone(running.pids("chip0")[0]))
    assert "control plane listens" not in running.text()
    (tmp_path / "chip0.end").unlink()
    (tmp_path / "late").unlink()
    running.wait_until_ready()
    running.wait_for(lambda: len(running.pids("chip0")) == 2)


def test_a_signal_before_the_control_plane_listens_stops_all(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "late").touch()
    running = start()
    running.wait_for(lambda: bool(running.pids("chip0") and running.pids("chip1")))
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(DEADLINE_S) == 0, running.text()
    assert all(gone(pid) for name in ("chip0", "chip1") for pid in running.pids(name))


def test_a_killed_worker_is_started_again(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_ready()
    os.kill(running.pids("chip0")[0], signal.SIGKILL)
    running.wait_for(lambda: len(running.pids("chip0")) == 2)
    assert "chip0 was ended by SIGKILL; starting it again in 0.5 s" in running.text()
    assert len(running.pids("chip1")) == 1


def test_a_worker_that_left_stays_away(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_ready()
    (running.folder / "chip1.end").write_text("0")
    running.wait_for(lambda: "; it is not started again" in running.text())
    time.sleep(1.0)
    assert len(running.pids("chip1")) == 1
    assert running.process.poll() is None


@pytest.mark.parametrize("first", [ExitCode.LEFT, ExitCode.REFUSED])
def test_when_the_last_worker_left_the_service_stops(
    start: Callable[..., Running], first: ExitCode
) -> None:
    running = start(hurried=True)
    running.wait_until_ready()
    for name, status in (("chip0", first), ("chip1", ExitCode.LEFT)):
        (running.folder / f"{name}.end").write_text(str(int(status)))
    assert running.process.wait(DEADLINE_S) == 1
    assert "no group can form again, stopping" in running.text()
    assert len(running.pids("chip0")) == len(running.pids("chip1")) == 1


def test_workers_that_a_stopping_control_plane_sends_away_are_no_failure(
    start: Callable[..., Running],
) -> None:
    running = start()
    running.wait_until_ready()
    for name in ("chip0", "chip1"):
        (running.folder / f"{name}.end").write_text("0")
    running.wait_for(lambda: all(gone(pid) for n in ("chip0", "chip1") for pid in running.pids(n)))
    (running.folder / "end").write_text("0")
    assert running.process.wait(DEADLINE_S) == 0


def test_what_leaves_when_all_stops_is_not_said_to_stay_away(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "stubborn").touch()
    running = start(drain_deadline_s=600.0)
    running.wait_until_ready()
    running.process.send_signal(signal.SIGINT)
    running.wait_for(lambda: "SIGINT" in running.text())
    (tmp_path / "chip0.end").write_text("0")
    running.wait_for(lambda: "chip0 ended with status 0 (LEFT)\n" in running.text())
    assert "not started again" not in running.text()


def test_a_verdict_kills_that_process_only(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_ready()
    first, innocent = running.pids("chip0")[0], running.pids("chip1")[0]
    (running.folder / "verdicts").write_text(f"chip1 {first} 7\nchip0 {first} 8\n")
    running.wait_for(lambda: len(running.pids("chip0")) == 2)
    assert f"chip0 (process {first}) is killed: frozen" in running.text()
    assert not gone(innocent)
    assert running.pids("chip1") == [innocent]


def test_a_verdict_that_is_told_again_kills_nobody(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_ready()
    verdicts = running.folder / "verdicts"
    (first,), (other,) = running.pids("chip0"), running.pids("chip1")
    verdicts.write_text(f"chip0 {first} 7\n")
    running.wait_for(lambda: len(running.pids("chip0")) == 2)
    # The system gave the new process the id of the one that was condemned.
    second = running.pids("chip0")[1]
    with verdicts.open("a") as told:
        told.write(f"chip0 {second} 7\nchip1 {other} 8\n")
    running.wait_for(lambda: len(running.pids("chip1")) == 2)
    assert not gone(second)
    assert running.pids("chip0") == [first, second]


def test_the_launcher_sends_the_first_key_of_the_file(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("# of the launcher\nfirst\nsecond\n")
    (tmp_path / "key").write_text("first")
    running = start("--api-key-file", str(tmp_path / "keys"))
    running.wait_until_ready()
    pid = running.pids("chip0")[0]
    (running.folder / "verdicts").write_text(f"chip0 {pid} 7\n")
    running.wait_for(lambda: len(running.pids("chip0")) == 2)
    assert f"chip0 (process {pid}) is killed: frozen" in running.text()


def test_the_end_of_the_control_plane_ends_all_with_its_status(
    start: Callable[..., Running],
) -> None:
    running = start()
    running.wait_until_ready()
    (running.folder / "end").write_text("7")
    assert running.process.wait(DEADLINE_S) == 7
    assert all(gone(pid) for name in ("chip0", "chip1") for pid in running.pids(name))


def test_a_second_signal_ends_at_once(start: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "stubborn").touch()
    running = start(drain_deadline_s=600.0)
    running.wait_until_ready()
    running.process.send_signal(signal.SIGINT)
    running.wait_for(lambda: "SIGINT" in running.text())
    time.sleep(0.3)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(DEADLINE_S) == 1
    assert all(gone(pid) for name in ("chip0", "chip1") for pid in running.pids(name))


@pytest.mark.parametrize(("faults_max", "starts"), [(1, 1), (9, 4)])
def test_a_chip_is_not_started_to_be_cordoned_and_the_end_tells_why(
    start: Callable[..., Running], tmp_path: Path, faults_max: int, starts: int
) -> None:
    (tmp_path / "unhealthy").touch()
    (tmp_path / "broken").write_text("burnt")
    for name in ("chip0", "chip1"):
        (tmp_path / f"{name}.end").write_text(str(int(ExitCode.GIVEN_UP)))
    running = start("--own-faults", str(faults_max), hurried=True)
    assert running.process.wait(DEADLINE_S) == 1
    assert len(running.pids("chip1")) == starts
    assert "chip1 is unavailable: burnt" in running.text().partition("stopping")[2]


@pytest.mark.parametrize(("status", "starts"), [(ExitCode.FAILED, 3), (ExitCode.MODEL_FAILED, 1)])
def test_workers_that_never_start_end_the_service(
    start: Callable[..., Running], tmp_path: Path, status: ExitCode, starts: int
) -> None:
    (tmp_path / "unhealthy").touch()
    for name in ("chip0", "chip1"):
        (tmp_path / f"{name}.end").write_text(str(int(status)))
    running = start(hurried=True)
    assert running.process.wait(DEADLINE_S) == 1
    assert "no group can form again" in running.text()
    assert status.name in running.text()
    assert len(running.pids("chip0")) == starts


def test_a_worker_without_hope_does_not_stop_the_others(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "chip0.end").write_text(str(int(ExitCode.MODEL_FAILED)))
    running = start()
    running.wait_until_ready()
    running.wait_for(lambda: "it is not started again" in running.text())
    time.sleep(1.0)
    assert len(running.pids("chip0")) == 1
    assert running.process.poll() is None


def test_a_chip_that_never_opens_is_left_alone_and_its_group_may_do_without(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "unhealthy").touch()
    (tmp_path / "chip0.end").write_text(str(int(ExitCode.BACKEND_FAILED)))
    running = start("--groups", "2", hurried=True)
    said = (
        "chip0 ended with status 7 (BACKEND_FAILED) and was not usable in 3 starts; "
        "it is not started again"
    )
    running.wait_for(lambda: said in running.text())
    time.sleep(0.5)
    assert running.process.poll() is None
    assert (len(running.pids("chip0")), len(running.pids("chip1"))) == (3, 1)
    (tmp_path / "chip1.end").write_text(str(int(ExitCode.MODEL_FAILED)))
    assert running.process.wait(DEADLINE_S) == 1
    assert "no group can form again" in running.text()


@pytest.mark.long
@pytest.mark.parametrize("used", [True, False])
def test_only_a_chip_that_becomes_usable_is_started_for_ever(
    start: Callable[..., Running], tmp_path: Path, used: bool
) -> None:
    running = start("--groups", "2")
    running.wait_until_ready()
    if used:
        (tmp_path / "chip0.used").touch()
    (tmp_path / "chip0.end").write_text(str(int(ExitCode.DEVICE_LOST)))
    if used:
        running.wait_for(lambda: len(running.pids("chip0")) == 5)
    else:
        running.wait_for(lambda: "not usable in 3 starts" in running.text())
    assert ("not started again" in running.text()) is not used


@pytest.mark.parametrize(
    ("state", "usable"),
    [("unavailable", False), ("lost", True), ("forming", None), ("idle", None)],
)
def test_a_process_was_usable_if_it_ended_as_anything_but_unavailable(
    state: str, usable: bool | None
) -> None:
    workers = [{"id": "chip0", "pid": 1, "state": "lost"}, {"id": "chip1", "pid": 7}]
    workers[1]["state"] = state
    assert was_usable({"workers": workers}, "chip1", 7) is usable
    assert was_usable({"workers": workers}, "chip1", 8) is False, "it never attached"
    assert was_usable({"workers": workers}, "chip2", 7) is False


def test_a_usable_start_sets_the_count_back() -> None:
    starts = WorkerStarts(4)
    usable = [False, False, False, True, False, False, False, False]
    assert [starts.count(each) for each in usable] == [*[False] * 7, True]
    assert starts.over


def test_a_group_that_needs_all_its_chips_ends_the_service_with_one_of_them(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    running = start("--groups", "2", "--fewer-chips", "off", hurried=True)
    running.wait_until_ready()
    (tmp_path / "chip0.end").write_text(str(int(ExitCode.MODEL_FAILED)))
    assert running.process.wait(DEADLINE_S) == 1


def test_an_unavailable_chip_is_named_with_the_reason_whenever_that_changes(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "unhealthy").touch()
    running = start()
    for times, reason in ((1, "burnt"), (2, "burnt"), (3, "gone")):
        (tmp_path / "broken").write_text(reason)
        states = "chip0 x, chip1 unavailable"
        running.wait_for(lambda: running.text().count(states) == times)  # noqa: B023
        (tmp_path / "broken").unlink()
        running.wait_for(lambda: running.text().count("chip0 x\n") == times)  # noqa: B023
    assert running.text().count("chip1 is unavailable: burnt") == 1
    assert running.text().count("chip1 is unavailable: gone") == 1


def test_a_reason_that_several_chips_have_is_told_once() -> None:
    reasons = {"chip0": "burnt", "chip1": "gone", "chip2": "burnt"}
    assert unavailable_lines(reasons) == [
        "chip0, chip2 are unavailable: burnt",
        "chip1 is unavailable: gone",
    ]
