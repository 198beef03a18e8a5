"""Telling the control plane of a chip that cannot be used, and the watch over its opening."""

import json
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from backends.cpu.plugin import CpuBackend
from backends.errors import BackendUnavailable, DeviceError
from backends.plugin import BackendConfig
from chip_worker import plane_address, unavailable, worker
from chip_worker.backend_debug import DebuggedBackend
from chip_worker.config import WorkerConfig
from chip_worker.connection import Connection
from chip_worker.errors import ModelError
from chip_worker.exit_code import ExitCode
from chip_worker.status_file import StatusFile
from chip_worker.unavailable import AcquireWatch, announce, identity_without_chip
from tests.fakes.scripted_control_plane import ScriptedControlPlane


def config(port: int) -> WorkerConfig:
    return WorkerConfig("chip0", f"127.0.0.1:{port}", "m", join_token="secret")


IDENTITY = identity_without_chip(config(0), incarnation=77, reason="burnt")


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(unavailable, "ANNOUNCE_DEADLINE_S", 1.0)
    monkeypatch.setattr(unavailable, "ANNOUNCE_PAUSE_S", 0.05)


def test_the_reason_is_told_and_acknowledged():
    with ScriptedControlPlane() as plane:
        announce(config(plane.port), IDENTITY)
        stream = plane.next_stream(timeout_s=0.1)
        assert stream.hello.unavailable_reason == "burnt"
        assert stream.hello.join_token == "secret"
        assert "burnt" in stream.read().goodbye.reason
        assert stream.read() is None


def test_a_control_plane_that_is_not_ready_is_asked_again(monkeypatch):
    monkeypatch.setattr(unavailable, "ANNOUNCE_DEADLINE_S", 30.0)
    monkeypatch.setattr(unavailable, "ANNOUNCE_PAUSE_S", 0.05)
    with ScriptedControlPlane() as plane:
        plane.refuse_with = (grpc.StatusCode.UNAVAILABLE, "not yet")
        told = threading.Thread(target=announce, args=(config(plane.port), IDENTITY))
        told.start()
        while not plane.hellos:
            time.sleep(0.01)
        plane.refuse_with = None
        told.join(30)
        assert plane.next_stream(timeout_s=0.1).read().HasField("goodbye")


def test_a_control_plane_that_is_announced_late_is_told_too(monkeypatch, tmp_path):
    """The deadline is for its answer; here it would be over before there is an address."""
    monkeypatch.setattr(unavailable, "ANNOUNCE_DEADLINE_S", 0.2)
    monkeypatch.setattr(unavailable, "ANNOUNCE_PAUSE_S", 0.05)
    monkeypatch.setattr(plane_address, "ANNOUNCE_TIMEOUT_S", 0.1)
    path = tmp_path / "announce.json"
    announced_late = replace(config(0), control_plane=f"127.0.0.1:@{path}")
    with ScriptedControlPlane() as plane, capture_logs() as logs:
        told = threading.Thread(target=announce, args=(announced_late, IDENTITY))
        told.start()
        time.sleep(0.5)
        assert told.is_alive()
        monkeypatch.setattr(unavailable, "ANNOUNCE_DEADLINE_S", 30.0)
        assert str(path) in logs[-1]["error"]
        whole = tmp_path / "whole"
        whole.write_text(json.dumps({"worker_port": plane.port}))
        whole.rename(path)
        assert plane.next_stream().read().HasField("goodbye")
        told.join(5)
        assert not told.is_alive()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED])
def test_it_ends_although_nobody_takes_the_reason(status):
    began_at = time.monotonic()
    with ScriptedControlPlane() as plane:
        plane.refuse_with = (status, "no")
        announce(config(plane.port), IDENTITY)
    assert time.monotonic() - began_at < 10.0


@pytest.mark.usefixtures("hurried")
def test_it_ends_although_no_control_plane_ever_listens(monkeypatch, tmp_path):
    monkeypatch.setattr(unavailable, "LISTENING_DEADLINE_S", 0.2)
    monkeypatch.setattr(plane_address, "ANNOUNCE_TIMEOUT_S", 0.05)
    never = replace(config(0), control_plane=f"127.0.0.1:@{tmp_path / 'announce.json'}")
    told = threading.Thread(target=announce, args=(never, IDENTITY), daemon=True)
    told.start()
    told.join(30)
    assert not told.is_alive()


def test_a_chip_that_does_not_open_in_time_ends_the_process_with_the_reason():
    reasons, exits, ended = [], [], threading.Event()

    def exit_process(code):
        exits.append(code)
        ended.set()

    with AcquireWatch(0.05, reasons.append, exit_process):
        assert ended.wait(5)
    assert exits == [ExitCode.BACKEND_FAILED]
    assert reasons == ["the chip could not be opened within 0.05 s"]


@pytest.mark.parametrize("hangs", [True, False])
def test_the_last_calls_are_logged_before_a_chip_is_given_up(monkeypatch, tmp_path, hangs):
    events, ended = [], threading.Event()
    debugged = DebuggedBackend(runtime=None, on_fault=lambda: events.append("last calls"))

    class Session:
        def __init__(self, *_arguments, **_named):
            if not hangs:
                raise DeviceError("burnt")
            assert ended.wait(5)

    def watch(_deadline_s, on_hung):
        return AcquireWatch(0.05 if hangs else 60.0, on_hung, lambda _code: ended.set())

    monkeypatch.setattr(worker, "ShardLoader", lambda *_arguments: None)
    monkeypatch.setattr(worker, "open_runtime", lambda *_arguments: None)
    monkeypatch.setattr(worker, "with_debug", lambda *_arguments: debugged)
    monkeypatch.setattr(worker, "Session", Session)
    monkeypatch.setattr(worker, "AcquireWatch", watch)
    monkeypatch.setattr(worker, "announce", lambda *_arguments: events.append("announced"))
    settings = WorkerConfig("chip0", "", "m", status_file=str(tmp_path / "status"))
    status = StatusFile(settings.status_file, "chip0", 77, time.time)
    with nullcontext() if hangs else pytest.raises(DeviceError, match="burnt"):
        worker._open_session(settings, None, None, Connection(settings, status), status, 77)
    assert events == ["last calls", "announced"]


def test_a_chip_that_opens_in_time_is_left_alone():
    exits = []
    with AcquireWatch(0.2, exits.append, exits.append):
        pass
    time.sleep(0.3)
    assert exits == []


@pytest.mark.parametrize("error", [ModelError("no such file"), KeyError("odd")])
def test_a_checkpoint_that_cannot_be_opened_is_not_blamed_on_the_chip(monkeypatch, error):
    def fail(*_arguments):
        raise error

    told = []
    monkeypatch.setattr(worker, "announce", lambda *arguments: told.append(arguments))
    monkeypatch.setattr(worker, "ShardLoader", fail)
    with pytest.raises(type(error)):
        worker.serve(config(1), CpuBackend(), BackendConfig(chip_indices=(0,)), "")
    assert not told


def test_a_checkpoint_may_take_longer_than_the_chip(monkeypatch):
    """Opening the chip fails here at once, and only that is told."""
    told, exits = [], []

    def watch(_deadline_s, tell):
        return AcquireWatch(0.2, tell, exits.append)

    def fail(*_arguments):
        raise ImportError("no libvendor.so.7")

    monkeypatch.setattr(worker, "announce", lambda _config, identity: told.append(identity))
    monkeypatch.setattr(worker, "ShardLoader", lambda *_arguments: time.sleep(0.5))
    monkeypatch.setattr(worker, "AcquireWatch", watch)
    monkeypatch.setattr(worker, "open_runtime", fail)
    with pytest.raises(BackendUnavailable, match=r"no libvendor\.so\.7"):
        worker.serve(config(1), CpuBackend(), BackendConfig(chip_indices=(0,)), "")
    assert [identity.unavailable_reason for identity in told] == ["ImportError: no libvendor.so.7"]
    assert exits == []
