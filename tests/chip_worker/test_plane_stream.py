"""A stream to the control plane over scripted calls, which can come in any order."""

import anyio
import grpc
import pytest

from chip_worker import plane_stream
from chip_worker.config import WorkerConfig
from chip_worker.inbox import Inbox
from chip_worker.plane_stream import PlaneStream, StreamEnded
from protos import worker_pb2, worker_pb2_grpc
from tests.chip_worker.test_wire import IDENTITY
from tests.fakes.cancelled_call import CancelledCall


class ScriptedCall:
    """An Attach call whose end is read before the writing of Goodbye returns."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self.written: list[worker_pb2.AttachRequest] = []
        self._status = status
        self._reads = 0
        self._ended = anyio.Event()

    async def write(self, message: worker_pb2.AttachRequest) -> None:
        self.written.append(message)
        if message.HasField("goodbye"):
            self._ended.set()
            await anyio.sleep_forever()

    async def read(self) -> object:
        self._reads += 1
        if self._reads == 1:
            welcome = worker_pb2.Welcome(term=1, heartbeat_interval_s=60.0, lease_s=60.0)
            return worker_pb2.AttachResponse(welcome=welcome)
        await self._ended.wait()
        return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return self._status

    async def details(self) -> str:
        return "as scripted"

    def cancel(self) -> None:
        pass


class ScriptedStub:
    def __init__(self, call: ScriptedCall) -> None:
        self._call = call

    def Attach(self) -> ScriptedCall:  # noqa: N802 - as the generated stub calls it
        return self._call

    async def Heartbeat(self, *_request: object, **_options: float) -> object:  # noqa: N802
        return worker_pb2.HeartbeatResponse(known=True)


def leave(call: ScriptedCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pb2_grpc, "WorkerServiceStub", lambda _channel: ScriptedStub(call))

    async def run() -> None:
        config = WorkerConfig(IDENTITY.worker_id, "127.0.0.1:1", "")
        stream = PlaneStream(config, config.control_plane, IDENTITY, Inbox(lambda _ended: None))
        await stream.attach(term_highest=0)
        stream.outbox.put_goodbye("drained")
        with anyio.fail_after(10.0):
            await stream.serve(alive=lambda: None)
        await stream.close()

    anyio.run(run)


def test_goodbye_may_be_answered_before_its_writing_returns(monkeypatch):
    call = ScriptedCall(grpc.StatusCode.OK)
    leave(call, monkeypatch)
    assert call.written[-1].goodbye.reason == "drained"


def test_a_stream_lost_while_goodbye_is_said_is_no_goodbye(monkeypatch):
    with pytest.raises(StreamEnded, match="UNAVAILABLE: as scripted"):
        leave(ScriptedCall(grpc.StatusCode.UNAVAILABLE), monkeypatch)


def test_a_foreign_cancellation_is_taken_for_that_of_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plane_stream, "ATTACH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(worker_pb2_grpc, "WorkerServiceStub", lambda _channel: CancelledCall())

    async def attach() -> None:
        config = WorkerConfig("chip0", "127.0.0.1:1", "m")
        stream = PlaneStream(config, config.control_plane, IDENTITY, Inbox(lambda _ended: None))
        try:
            await stream.attach(term_highest=0)
        finally:
            await stream.close()

    with pytest.raises(StreamEnded, match="no Welcome"):
        anyio.run(attach)
