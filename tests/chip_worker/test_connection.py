"""The worker's link against a scripted control plane: registering, fencing, losing, leaving."""

import json
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from structlog.testing import capture_logs

from chip_worker import plane_address
from chip_worker.batch import (
    Fault,
    FaultKind,
    FormGroup,
    Ready,
    ResetEpoch,
    RowResult,
    Shutdown,
    Step,
    StepAck,
    StepResult,
    StepTimes,
)
from chip_worker.config import WorkerConfig
from chip_worker.connection import DISCONNECTED, Connection
from chip_worker.exit_code import ExitCode
from chip_worker.status_file import StatusFile, check_status_file
from chip_worker.wire import Identity
from chip_worker.worker import run_commands
from protos import worker_pb2, worker_pb2_grpc
from tests.fakes.cancelled_call import CancelledCall
from tests.fakes.scripted_control_plane import ScriptedControlPlane

TERM = 1000
IDENTITY = Identity(
    worker_id="chip0",
    incarnation=77,
    pid=4711,
    backend="cpu",
    chip_index=0,
    chip_description="a core",
    memory_bytes=0,
    dtype="float32",
    batch_invariant=False,
    block_tokens_multiple=1,
    model_name="m",
    architecture="llama",
    model_digest="ab",
    context_tokens=2048,
    vocabulary_size=100,
)


class FakeSession:
    """Answers commands as a session would; `hold` keeps it inside a step until aborted."""

    def __init__(self) -> None:
        self.handled: list[object] = []
        self.arrived = threading.Condition()
        self.hold = threading.Event()
        self.hold.set()
        self.aborts = 0
        self.probing = False
        self.connection: Connection | None = None

    def handle(self, command: object) -> None:
        with self.arrived:
            self.handled.append(command)
            self.arrived.notify_all()
        self.hold.wait(10)
        if isinstance(command, FormGroup):
            self.connection.report(Ready(command.term, command.epoch, 64, 100.0, 0.1, 2, 1))
        elif isinstance(command, Step):
            times = StepTimes(command.step_id)
            rows = (RowResult((5,), ()),)
            self.connection.report(
                StepResult(command.term, command.epoch, command.step_id, rows, times)
            )

    def abort(self, _ended: FormGroup) -> None:
        self.aborts += 1
        self.hold.set()

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 5.0) -> list[object]:
        def found() -> list[object]:
            return [command for command in self.handled if isinstance(command, kind)]

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(found()) >= count, timeout_s), self.handled
        return found()


class RunningWorker:
    """A connection and its compute loop, without a chip."""

    def __init__(self, control_plane: str, status_path: str) -> None:
        config = WorkerConfig(
            worker_id="chip0",
            control_plane=control_plane,
            model_path="m",
            connect_backoff_first_s=0.02,
            connect_backoff_max_s=0.1,
        )
        self.status_path = status_path
        self.session = FakeSession()
        self.exits: list[int] = []
        status = StatusFile(status_path, "chip0", 77, time.time)
        self.connection = Connection(config, status, exit_process=self.exits.append)
        self.session.connection = self.connection
        self.compute = threading.Thread(
            target=lambda: run_commands(self.connection.inbox, self.session.handle), daemon=True
        )
        self.connection.start(IDENTITY, self.session.abort, lambda: self.session.probing)
        self.compute.start()

    def state(self) -> dict:
        with open(self.status_path) as file:
            return json.load(file)

    def stop(self) -> None:
        self.session.hold.set()
        self.connection.inbox.put_shutdown("the test is over")
        self.compute.join(5)
        self.connection.close("the test is over")


@pytest.fixture
def plane() -> Iterator[ScriptedControlPlane]:
    with ScriptedControlPlane(term=TERM) as scripted:
        yield scripted


@pytest.fixture
def worker(plane, tmp_path) -> Iterator[RunningWorker]:
    running = RunningWorker(address(plane), str(tmp_path / "status.json"))
    yield running
    running.stop()


def address(plane: ScriptedControlPlane) -> str:
    return f"127.0.0.1:{plane.port}"


def form(
    stream, epoch: int = 1, term: int = TERM, step_deadline_s: float = 30.0, **changes: float
) -> None:
    stream.send(
        form=worker_pb2.FormGroup(
            term=term,
            group_id="g0",
            group_epoch=epoch,
            layout=worker_pb2.GroupLayout(tensor_rank=0, tensor_size=1),
            **{"deadline_s": 30.0, **changes},
            block_tokens=16,
            slots=8,
            chunk_tokens=64,
            context_tokens=2048,
            blocks_wanted=1024,
            kv_policy="cover",
            step_deadline_s=step_deadline_s,
        )
    )


def step(stream, step_id: int, epoch: int = 1, term: int = TERM) -> None:
    stream.send(
        step=worker_pb2.Step(
            term=term,
            group_epoch=epoch,
            step_id=step_id,
            row_slot=[0],
            row_tokens=[1],
            sampled_row=[0],
        )
    )


def wait_until(condition, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_a_worker_introduces_itself_forms_and_computes(plane, worker):
    stream = plane.next_stream()
    assert (stream.hello.worker_id, stream.hello.incarnation) == ("chip0", 77)
    assert stream.hello.model.context_tokens == 2048
    form(stream)
    assert stream.read().ready.blocks == 64
    step(stream, 1)
    result = stream.read().result
    assert (result.step_id, list(result.token_ids)) == (1, [5])
    wait_until(lambda: plane.heartbeats and plane.heartbeats[-1].step_done == 1)
    assert plane.heartbeats[-1].group_epoch == 1
    assert worker.state()["state"] == "serving"
    assert worker.state()["group"] == "g0"


@pytest.mark.parametrize("content", [None, "{"])
def test_a_port_that_is_not_announced_is_told_and_looked_for_again(
    monkeypatch, plane, tmp_path, content
):
    monkeypatch.setattr(plane_address, "ANNOUNCE_TIMEOUT_S", 0.05)
    path = tmp_path / "announce.json"
    if content is not None:
        path.write_text(content)
    with capture_logs() as logs:
        worker = RunningWorker(f"127.0.0.1:@{path}", str(tmp_path / "status.json"))
        wait_until(lambda: len(logs) >= 2)
        assert worker.state()["state"] == "connecting"
        whole = tmp_path / "whole"
        whole.write_text(json.dumps({"worker_port": plane.port}))
        whole.rename(path)
        assert plane.next_stream().hello.worker_id == "chip0"
        worker.stop()
    assert {log["event"] for log in logs[:2]} == {DISCONNECTED}
    assert [log["attempt"] for log in logs[:2]] == [1, 2]
    assert str(path) in logs[0]["error"]


def test_commands_of_another_term_or_epoch_are_dropped(plane, worker):
    stream = plane.next_stream()
    form(stream, epoch=5)
    stream.read()
    step(stream, 1, epoch=4)
    step(stream, 1, epoch=5, term=TERM - 1)
    form(stream, epoch=6, term=TERM - 1)
    stream.send(reset=worker_pb2.ResetEpoch(term=TERM, group_epoch=4))
    step(stream, 1, epoch=5)
    assert stream.read().result.group_epoch == 5
    assert len(worker.session.handled) == 2


def test_a_reset_aborts_at_once_and_drops_what_waits(plane, worker):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    worker.session.hold.clear()
    for step_id in (1, 2, 3):
        step(stream, step_id)
    worker.session.wait_for(Step)
    stream.send(reset=worker_pb2.ResetEpoch(term=TERM, group_epoch=1, reason="a peer was lost"))
    assert worker.session.wait_for(ResetEpoch)[0].reason == "a peer was lost"
    assert worker.session.aborts == 1
    assert len(worker.session.wait_for(Step)) == 1
    # The result of the aborted step belongs to nobody: the next message is of the next epoch.
    form(stream, epoch=2)
    assert stream.read().ready.group_epoch == 2


def test_a_broken_stream_ends_the_epoch_and_the_worker_registers_again(plane, worker):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    plane.term = TERM + 7
    stream.end(grpc.StatusCode.UNAVAILABLE, "the control plane restarts")
    again = plane.next_stream()
    assert again.hello.incarnation == 77
    assert again.hello.term_highest == TERM
    worker.session.wait_for(ResetEpoch)
    form(again, epoch=1, term=TERM + 7)
    assert again.read().ready.term == TERM + 7


def test_a_control_plane_of_a_lower_term_is_not_served(plane, worker):
    plane.next_stream().end(grpc.StatusCode.UNAVAILABLE)
    plane.term = TERM - 1
    wait_until(lambda: len(plane.hellos) >= 4)
    assert worker.state()["state"] == "connecting"
    plane.term = TERM
    while len(plane.hellos) < 20:
        stream = plane.next_stream()
        form(stream)
        if stream.read() is not None:
            break
    worker.session.wait_for(FormGroup)


@pytest.mark.parametrize("how", ["unanswered", "unknown"])
def test_a_worker_without_answered_heartbeats_gives_its_epoch_up(plane, worker, how):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    began_at = time.monotonic()
    if how == "unanswered":
        plane.answers_heartbeats = False
    else:
        plane.knows_workers = False
    worker.session.wait_for(ResetEpoch)
    assert stream.read() is None
    if how == "unanswered":
        assert 0.3 < time.monotonic() - began_at < 10.0
    plane.answers_heartbeats = plane.knows_workers = True
    plane.next_stream()


def test_a_worker_the_control_plane_gave_up_leaves(plane, worker):
    plane.next_stream().end(grpc.StatusCode.ABORTED, "no heartbeat for 4 s")
    worker.compute.join(5)
    assert worker.connection.exit_code is ExitCode.GIVEN_UP


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.ABORTED, ExitCode.GIVEN_UP),
        (grpc.StatusCode.UNAUTHENTICATED, ExitCode.REFUSED),
        (grpc.StatusCode.FAILED_PRECONDITION, ExitCode.REFUSED),
    ],
)
def test_a_worker_that_is_not_wanted_ends(plane, tmp_path, status, code):
    plane.refuse_with = (status, "no")
    worker = RunningWorker(address(plane), str(tmp_path / "status.json"))
    worker.compute.join(5)
    assert not worker.compute.is_alive()
    assert worker.connection.exit_code is code
    worker.connection.close("over")
    assert check_status_file(worker.status_path, time.time()) == (False, "failed")
    assert len(plane.hellos) == 1


def test_shutdown_is_answered_with_goodbye(plane, worker):
    stream = plane.next_stream()
    stream.send(shutdown=worker_pb2.Shutdown(term=TERM, reason="drained"))
    assert worker.session.wait_for(Shutdown)[0].reason == "drained"
    worker.compute.join(5)
    worker.connection.close("drained")
    assert stream.read().goodbye.reason == "drained"
    assert stream.read() is None
    assert worker.connection.exit_code is ExitCode.LEFT


def test_a_worker_leaves_even_if_nobody_answers(plane, tmp_path):
    plane.refuse_with = (grpc.StatusCode.UNAVAILABLE, "not yet")
    worker = RunningWorker(address(plane), str(tmp_path / "status.json"))
    wait_until(lambda: len(plane.hellos) >= 2)
    began_at = time.monotonic()
    worker.stop()
    assert time.monotonic() - began_at < 5.0
    assert worker.state()["state"] == "leaving"


def test_a_worker_leaves_while_its_stream_is_prepared(monkeypatch, tmp_path):
    """The cancellation that this takes comes back as a foreign one."""
    call = CancelledCall()
    monkeypatch.setattr(worker_pb2_grpc, "WorkerServiceStub", lambda _channel: call)
    worker = RunningWorker("127.0.0.1:1", str(tmp_path / "status.json"))
    assert call.read_begun.wait(5)
    worker.stop()
    assert not worker.connection._thread.is_alive()
    assert worker.connection.exit_code is ExitCode.LEFT
    assert worker.state()["state"] == "leaving"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connection_that_ends_by_itself_ends_the_worker(monkeypatch, tmp_path):
    """The compute thread would wait for ever for a command."""
    call = CancelledCall(patience_s=0.0)
    monkeypatch.setattr(worker_pb2_grpc, "WorkerServiceStub", lambda _channel: call)
    worker = RunningWorker("127.0.0.1:1", str(tmp_path / "status.json"))
    worker.compute.join(5)
    assert not worker.compute.is_alive()
    assert worker.connection.exit_code is ExitCode.FAILED
    worker.connection.close("over")


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [(FaultKind.DEVICE, ExitCode.DEVICE_LOST), (FaultKind.MODEL, ExitCode.MODEL_FAILED)],
)
def test_a_final_fault_is_reported_before_the_process_ends(plane, worker, kind, exit_code):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    worker.connection.report(Fault(TERM, 1, 3, kind, "it fell off", exiting=True))
    worker.compute.join(5)
    worker.connection.close("failed for good")
    assert stream.read().fault.message == "it fell off"
    assert worker.connection.exit_code is exit_code


def test_a_compute_thread_that_does_not_come_back_ends_the_process(plane, worker):
    stream = plane.next_stream()
    form(stream, step_deadline_s=0.2)
    stream.read()
    worker.session.abort = lambda _ended: None
    worker.connection._abort = worker.session.abort
    exits_before_fault = []
    worker.connection.on_fault = lambda: exits_before_fault.append(list(worker.exits))
    worker.session.hold.clear()
    step(stream, 1)
    worker.session.wait_for(Step)
    stream.send(reset=worker_pb2.ResetEpoch(term=TERM, group_epoch=1))
    wait_until(lambda: worker.exits == [ExitCode.HUNG])
    assert exits_before_fault == [[]]
    fault = stream.read().fault
    assert (fault.group_epoch, fault.step_id, fault.exiting) == (1, 1, True)
    assert fault.kind == worker_pb2.FAULT_KIND_DEVICE, "its own chip is to blame"
    assert "did not come back for 0.2 s" in fault.message
    assert stream.read().HasField("goodbye")


@pytest.mark.parametrize(
    ("probing", "limits", "exits"),
    [
        (True, {"probe_deadline_s": 0.2}, [ExitCode.HUNG]),
        (False, {"probe_deadline_s": 0.2}, []),
        # What a formation has taken already counts; a step's patience it always has.
        (False, {"deadline_s": 0.5}, [ExitCode.HUNG]),
    ],
)
def test_a_rank_that_hangs_while_its_group_forms_has_its_own_time(
    plane, worker, probing, limits, exits
):
    worker.session.hold.clear()
    worker.session.probing = probing
    worker.connection._abort = lambda _ended: None
    stream = plane.next_stream()
    form(stream, step_deadline_s=0.4, **limits)
    worker.session.wait_for(FormGroup)
    time.sleep(0.3)
    began_at = time.monotonic()
    stream.send(reset=worker_pb2.ResetEpoch(term=TERM, group_epoch=1))
    if exits:
        wait_until(lambda: worker.exits == exits)
        assert time.monotonic() - began_at < 5.0
    else:
        time.sleep(1.0)
        assert worker.exits == []


def test_a_final_fault_is_told_although_its_epoch_is_over(plane, worker):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    stream.send(reset=worker_pb2.ResetEpoch(term=TERM, group_epoch=1))
    worker.session.wait_for(ResetEpoch)
    worker.connection.report(Fault(TERM, 1, 3, FaultKind.DEVICE, "late", exiting=False))
    worker.connection.report(Fault(TERM, 1, 3, FaultKind.DEVICE, "last", exiting=True))
    assert stream.read().fault.message == "last"


def test_the_end_of_the_stream_does_not_hide_why_the_process_ends(plane, worker):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    worker.session.hold.clear()
    step(stream, 1)
    worker.session.wait_for(Step)
    worker.connection.report(Fault(TERM, 1, 1, FaultKind.MODEL, "no", exiting=True))
    assert stream.read().fault.message == "no"
    stream.end(grpc.StatusCode.ABORTED, "dropped")
    wait_until(lambda: not worker.connection._thread.is_alive())
    assert worker.connection.exit_code is ExitCode.MODEL_FAILED


def test_acknowledgements_travel_together(plane, worker):
    stream = plane.next_stream()
    form(stream)
    stream.read()
    for step_id in range(1, 21):
        worker.connection.report(StepAck(TERM, 1, (StepTimes(step_id),)))
    acks = [stream.read().ack for _ in range(2)]
    assert [len(ack.times) for ack in acks] == [16, 4]
    assert [times.step_id for ack in acks for times in ack.times] == list(range(1, 21))
