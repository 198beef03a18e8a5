"""`polychip bench startup`: stages, refusals, what fails; and the real service once."""

import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner

from scripts import startup
from scripts.cli import bench_startup
from scripts.cli.bench_startup import result_table
from scripts.cli.main import main
from scripts.startup import StartFailed, StartUp, free_port, stages_of, start_up

SERVER = str(Path(__file__).parents[1] / "fakes" / "starting_server.py")
LAUNCHED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "startup", *arguments])


def started(*arguments, **options):
    port = free_port()
    command = [sys.executable, SERVER, str(port), *arguments]
    return anyio.run(lambda: start_up(command, port, **options))


def test_stages_are_read_from_the_log():
    def line(event, second):
        return json.dumps({"event": event, "timestamp": f"2026-01-02T03:04:{second:09.6f}Z"})

    log = "\n".join(
        [
            "   1.0 s  control plane listens: http 1",
            line("service.listening", 6.5),
            line("worker.registered", 7),
            line("worker.registered", 8.25),
            line("worker.left", 9),
            '{"event": "group.serving"}',
            "[]",
        ]
    )
    assert stages_of(log, LAUNCHED) == {"control plane listens": 1.5, "worker registered": 3.25}


def test_a_server_is_asked_until_it_has_its_model_and_then_ended():
    found = started()
    assert found.first_token_s > 0.2, "it listens only then"
    assert found.processor_s > 0
    assert not found.stages_s


def test_a_server_that_refuses_for_good_is_an_error():
    with pytest.raises(StartFailed, match="HTTP 401: no"):
        started("401")


def test_a_server_that_never_has_its_model_is_an_error_with_what_it_printed():
    with pytest.raises(StartFailed, match=r"no answer within 5 s\nlistening"):
        started("503", deadline_s=5.0)


def test_a_server_that_ends_is_an_error_with_what_it_printed():
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(StartFailed, match="it ended with status 3\nno such model"):
        anyio.run(start_up, command, free_port())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--runs", "0"], "not in the range 1<=x<=1000"),
        (["--against", "llama-server --port 80"], "does not say where the port goes"),
        (["--against", "'"], "is no command line"),
        (["--json", "no/such/folder.json"], "is no file in a folder that exists"),
        (["--", "--http-port", "5"], "--http-port is not for this command"),
        (["--", "--weights=native", "--announce=x"], "--announce is not for this command"),
        (["--", "--host", "::1"], "--host is not for this command"),
    ],
)
def test_nonsense_is_refused_before_anything_is_started(arguments, reason, monkeypatch):
    monkeypatch.setattr(bench_startup, "start_up", lambda *_: pytest.fail("it starts"))
    result = bench(*arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_servers_take_turns_and_the_first_turn_does_not_count(monkeypatch, tmp_path):
    launched = []

    async def noted(command, port):
        launched.append(command)
        assert str(port) in command
        own = command[0] == sys.executable
        stages = {"group serves": 1.0 * len(launched)} if own else {}
        return StartUp(stages, (2.0 if own else 1.0) * len(launched), 0.5)

    monkeypatch.setattr(bench_startup, "start_up", noted)
    path = tmp_path / "starts.json"
    other = ["--against", "other/server -p {port}"]
    result = bench("--runs", "2", *other, "--json", str(path), "--", "--weights", "native")
    assert result.exit_code == 0, result.output
    assert [command[0] for command in launched] == [sys.executable, "other/server"] * 3
    assert launched[0][-2:] == ["--weights", "native"]
    found = json.loads(path.read_text())
    own, against = found["servers"]
    assert own["starts"][0] == {"group serves": 3.0, "first token": 6.0, "processor time": 0.5}
    assert (own["name"], against["name"], len(against["starts"])) == ("polychip", "server", 2)
    lines = result.stdout.splitlines()
    (first,) = [line.split() for line in lines if line.split()[:2] == ["first", "token"]]
    assert first[2:] == ["8.00", "(6.00", "to", "10.00)", "5.00", "(4.00", "to", "6.00)", "1.58"]
    assert any(line.split()[:2] == ["group", "serves"] for line in lines)


def test_a_stage_that_was_not_told_has_a_dash():
    """By server and by start: only what both have told of the same start is compared."""
    runs = [
        [StartUp({"group serves": 3.0}, 4.0, 0.5), StartUp({}, 2.0, 0.5)],
        [StartUp({"worker registered": 1.0}, 4.0, 0.5), StartUp({"group serves": 9.0}, 2.0, 0.5)],
        [StartUp({"weights loaded": 6.0}, 4.0, 0.5), StartUp({"weights loaded": 3.0}, 2.0, 0.5)],
    ]
    table = result_table([["polychip"], ["server"]], runs)
    columns = [column.cells for column in table.columns]
    rows = {name: cells for name, *cells in zip(*columns, strict=True)}
    assert rows["group serves"] == ["3.00 (3.00 to 3.00)", "9.00 (9.00 to 9.00)", "-"]
    assert rows["worker registered"] == ["1.00 (1.00 to 1.00)", "-", "-"]
    assert rows["control plane listens"] == ["-", "-", "-"]
    assert rows["weights loaded"][-1] == "2.00"
    assert rows["first token"][-1] == "2.00"


def test_a_server_that_fails_ends_the_command(monkeypatch):
    monkeypatch.setattr(startup, "DEADLINE_S", 60.0)
    result = bench("--runs", "1", "--", "--model", "no-such-model")
    assert result.exit_code == 1
    assert "no-such-model" in result.stderr


def test_the_server_that_fails_is_named_with_its_command(monkeypatch):
    async def fails(_command, _port):
        raise StartFailed("it ended with status 1\nwhat it printed")

    monkeypatch.setattr(bench_startup, "start_up", fails)
    monkeypatch.setattr(bench_startup, "free_port", lambda: 1234)
    own = bench("--", "--model", "a model")
    assert own.exit_code == 1
    assert "Error: polychip, launched as `" in own.stderr
    assert "--model 'a model'`: it ended with status 1\nwhat it printed" in own.stderr

    async def starts(_command, _port):
        monkeypatch.setattr(bench_startup, "start_up", fails)
        return StartUp({}, 1.0, 0.5)

    monkeypatch.setattr(bench_startup, "start_up", starts)
    other = bench("--against", "other/server -p {port}")
    assert "Error: server, launched as `other/server -p 1234`: it ended" in other.stderr


@pytest.mark.end_to_end
def test_the_service_tells_every_stage(tmp_path):
    pytest.importorskip("torch", reason="workers need torch")
    path = tmp_path / "starts.json"
    against = shlex.join([sys.executable, SERVER, "{port}"])
    result = bench("--runs", "1", "--against", against, "--json", str(path), "--", "--chips", "1")
    assert result.exit_code == 0, result.output
    (start,) = json.loads(path.read_text())["servers"][0]["starts"]
    order = ["worker registered", "weights loaded", "group serves", "first token"]
    times = [start[name] for name in order]
    assert times == sorted(times)
    assert 0 < start["control plane listens"] < start["worker registered"]
