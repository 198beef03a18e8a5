"""The worker port over real gRPC: admission, fencing, ends of streams."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import pytest

from control_plane.dispatch.step_stream import StepStream
from control_plane.dispatch.worker_server import WorkerServer
from control_plane.errors import ConfigurationError
from control_plane.metrics import DispatchCounters
from control_plane.scheduling.messages import (
    DropWorker,
    FormGroup,
    Heartbeat,
    LossKind,
    RendezvousOpened,
    ResetWorker,
    SendRendezvous,
    SendStep,
    StepDone,
    StepPlan,
    StepRow,
    WorkerAttached,
    WorkerFaulted,
    WorkerLost,
    WorkerReady,
)
from protos import worker_pb2
from tests.control_plane.dispatch.conftest import TERM
from tests.fakes.dialling_worker import DiallingWorker
from tests.fakes.driven_core import worker_info

pytestmark = pytest.mark.anyio


async def join_group(plane, worker, epoch=1, rank=0, world_size=1) -> None:
    """Makes an attached worker a rank, and reads what it is told."""
    plane.dispatcher.carry_out(
        FormGroup(worker.worker_id, worker.incarnation, "g0", epoch, rank, world_size, 60.0)
    )
    assert (await worker.read()).form.group_epoch == epoch


# ---------------------------------------------------------------- admission


async def test_a_worker_is_welcomed_and_announced(plane):
    welcome = await plane.worker().attach()
    assert (welcome.term, welcome.heartbeat_interval_s, welcome.lease_s) == (TERM, 0.1, 1.0)
    attached = await plane.wait_for_event(WorkerAttached)
    assert (attached.worker.worker_id, attached.worker.incarnation) == ("chip0", 11)
    assert (attached.worker.dtype, attached.worker.context_tokens) == ("float32", 2048)


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"protocol_version": 99}, grpc.StatusCode.FAILED_PRECONDITION, "version 99"),
        ({"worker_id": ""}, grpc.StatusCode.FAILED_PRECONDITION, "worker_id"),
        ({"incarnation": 0}, grpc.StatusCode.FAILED_PRECONDITION, "incarnation"),
    ],
)
async def test_a_hello_that_cannot_be_taken_is_refused_with_the_reason(
    plane, changes, status, says
):
    worker = plane.worker()
    await worker.call.write(worker.hello(**changes))
    code, details = await worker.status()
    assert code is status
    assert says in details
    assert plane.events == []


async def test_a_silent_stream_is_ended(plane):
    """With a status that does not tell the worker to give up: it may only have been slow."""
    code, details = await plane.worker().status()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "no Hello came within 0.3 s" in details


async def test_a_stream_that_begins_otherwise_is_refused(plane):
    worker = plane.worker()
    await worker.send(goodbye=worker_pb2.Goodbye(reason="hello"))
    code, details = await worker.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "begins with Hello" in details


@pytest.mark.parametrize("attached", [False, True])
async def test_bytes_that_are_no_message_end_only_their_stream(plane, caplog, attached):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plane.port}") as channel:
        call = channel.stream_stream("/polychip.v1.WorkerService/Attach")()
        other = plane.worker("chip1")
        await other.attach()
        if attached:
            await call.write(other.hello(worker_id="chip0").SerializeToString())
            await call.read()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "2 bytes are no message" in await call.details()
    assert plane.counters.messages_refused == int(attached)
    assert plane.count(WorkerLost) == int(attached)
    assert await other.heartbeat(TERM)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_heartbeat_that_is_no_message_is_refused(plane, caplog):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plane.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/polychip.v1.WorkerService/Heartbeat")(b"\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_stream_whose_handler_is_cancelled_says_so():
    class SilentContext:
        async def read(self) -> None:
            await asyncio.Event().wait()

        async def write(self, message: bytes) -> None:
            raise AssertionError(message)

    events = []
    stream = StepStream(worker_info("chip0"), TERM, events.append, DispatchCounters())
    running = asyncio.ensure_future(stream.run(SilentContext()))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [event.message for event in events] == ["the stream was cancelled"]


async def test_the_join_token_decides(plane_with):
    async with plane_with(join_token="secret") as plane:
        for token in (None, "wrong"):
            worker = plane.worker()
            await worker.call.write(worker.hello(join_token=token))
            assert (await worker.status())[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await plane.worker().attach(join_token="secret")).term == TERM


async def test_a_taken_port_is_a_clear_error(plane):
    second = WorkerServer(
        plane.dispatcher, heartbeat_interval_s=1, lease_s=2, message_bytes_max=1 << 20
    )
    with pytest.raises(ConfigurationError, match=f":{plane.port}.*--worker-port"):
        await second.start("127.0.0.1", plane.port)
    await second.stop(0)


async def test_a_newer_process_of_the_name_supersedes_the_older(plane):
    older, newer = plane.worker(incarnation=11), plane.worker(incarnation=12)
    await older.attach()
    await newer.attach()
    code, details = await older.status()
    assert code is grpc.StatusCode.ABORTED
    assert "SUPERSEDED" in details
    kinds = [(type(event), event) for event in plane.events]
    assert [kind for kind, _ in kinds] == [WorkerAttached, WorkerLost, WorkerAttached]
    assert plane.events[1].incarnation == 11
    assert not await older.heartbeat(TERM)
    assert await newer.heartbeat(TERM)


async def test_a_worker_that_served_a_higher_term_raises_ours(plane):
    first = plane.worker("chip0")
    await first.attach(term_highest=TERM - 1)
    second = plane.worker("chip1", incarnation=21)
    assert (await second.attach(term_highest=TERM + 5)).term == TERM + 6
    # Who followed the lower term registers again, and is not lost for good.
    assert (await first.status())[0] is grpc.StatusCode.UNAVAILABLE
    again = plane.worker("chip0")
    assert (await again.attach(term_highest=TERM)).term == TERM + 6


# ---------------------------------------------------------------- the way of a group


async def test_a_group_forms_and_computes(plane):
    first, second = plane.worker("chip0", 11), plane.worker("chip1", 21)
    for rank, worker in enumerate((first, second)):
        await worker.attach()
        await join_group(plane, worker, rank=rank, world_size=2)
    await first.send(rendezvous=worker_pb2.Rendezvous(term=TERM, group_epoch=1, address=b"here"))
    opened = await plane.wait_for_event(RendezvousOpened)
    plane.dispatcher.carry_out(SendRendezvous("chip1", 21, 1, opened.address))
    assert (await second.read()).rendezvous.address == b"here"
    ready = worker_pb2.Ready(
        term=TERM, group_epoch=1, blocks=64, prefill_tokens_per_s=100, decode_step_s=0.1
    )
    await second.send(ready=ready)
    assert (await plane.wait_for_event(WorkerReady)).blocks == 64
    plan = StepPlan("g0", 1, 1, new_blocks=((3, 0, 9),), rows=(StepRow(3, 5, True),), digest=7)
    plane.dispatcher.carry_out(SendStep(("chip0", "chip1"), plan))
    steps = [(await worker.read()).step for worker in (first, second)]
    assert steps[0] == steps[1]
    assert (steps[0].term, list(steps[0].row_slot), steps[0].state_digest) == (TERM, [3], 7)
    await second.send(
        ack=worker_pb2.StepAck(
            term=TERM, group_epoch=1, times=[worker_pb2.StepTimes(step_id=1)] * 3
        )
    )
    await first.send(
        result=worker_pb2.StepResult(
            term=TERM,
            group_epoch=1,
            step_id=1,
            token_count=[1],
            token_ids=[42],
            times=worker_pb2.StepTimes(step_id=1, device_ns=2_000_000_000),
        )
    )
    done = await plane.wait_for_event(StepDone)
    assert (done.group_id, done.epoch, done.step_id, done.device_s) == ("g0", 1, 1, 2.0)
    assert done.results[0].token_ids == (42,)
    assert plane.counters.steps_acknowledged == 3


async def test_reports_of_another_term_or_epoch_are_dropped(plane):
    worker = plane.worker()
    await worker.attach()
    await join_group(plane, worker, epoch=5)
    for term, epoch in ((TERM - 1, 5), (TERM + 1, 5), (TERM, 4), (TERM, 6)):
        await worker.send(fault=worker_pb2.Fault(term=term, group_epoch=epoch, message="stale"))
    fault = worker_pb2.Fault(
        term=TERM, group_epoch=5, message="real", kind=worker_pb2.FAULT_KIND_OUT_OF_MEMORY
    )
    await worker.send(fault=fault)
    faulted = await plane.wait_for_event(WorkerFaulted)
    assert (faulted.message, faulted.kind) == ("real", LossKind.DEVICE)
    assert plane.counters.messages_stale == 4


async def test_a_reset_worker_is_in_no_epoch(plane):
    worker = plane.worker()
    await worker.attach()
    await join_group(plane, worker, epoch=5)
    plane.dispatcher.carry_out(ResetWorker("chip0", 11, 5, "a peer was lost"))
    assert (await worker.read()).reset.group_epoch == 5
    # A step planned before must not reach it.
    plane.dispatcher.carry_out(SendStep(("chip0",), StepPlan("g0", 5, 1)))
    await join_group(plane, worker, epoch=6)


async def test_effects_for_a_process_that_was_replaced_are_dropped(plane):
    worker = plane.worker(incarnation=12)
    await worker.attach()
    plane.dispatcher.carry_out(FormGroup("chip0", 11, "g0", 1, 0, 1, 60.0))
    plane.dispatcher.carry_out(DropWorker("chip0", 11, "silent"))
    plane.dispatcher.carry_out(FormGroup("chip9", 11, "g0", 1, 0, 1, 60.0))
    await join_group(plane, worker, epoch=2)


async def test_a_dropped_worker_learns_that_it_must_not_return(plane):
    worker = plane.worker()
    await worker.attach()
    plane.dispatcher.carry_out(DropWorker("chip0", 11, "silent for 4 s"))
    code, details = await worker.status()
    assert (code, details) == (grpc.StatusCode.ABORTED, "silent for 4 s")
    assert (await plane.wait_for_event(WorkerLost)).kind is LossKind.STREAM
    assert not await worker.heartbeat(TERM)


class SlowContext:
    """A call of which a message takes its time; gRPC takes no status until it is through."""

    def __init__(self):
        self.writing = asyncio.Event()
        self.said = []

    async def write(self, _message):
        self.writing.set()
        await asyncio.sleep(0.05)
        self.said.append("message")

    async def read(self):
        await asyncio.Event().wait()

    async def abort(self, status, _details):
        self.said.append(status)


async def test_a_status_waits_for_the_message_on_its_way():
    context = SlowContext()
    stream = StepStream(worker_info("chip0"), TERM, lambda _event: None, DispatchCounters())
    stream.send(b"a step")
    running = asyncio.ensure_future(stream.run(context))
    await context.writing.wait()
    stream.close(grpc.StatusCode.ABORTED, "dropped")
    await asyncio.wait_for(running, 5.0)
    assert context.said == ["message", grpc.StatusCode.ABORTED]


async def test_heartbeats_count_only_for_the_process_and_term_that_attached(plane):
    worker = plane.worker()
    await worker.attach()
    assert await worker.heartbeat(TERM)
    assert not await worker.heartbeat(TERM - 1)
    assert not await worker.heartbeat(TERM, incarnation=99)
    assert plane.events[1:] == [Heartbeat("chip0", 11)]


async def test_a_worker_without_a_chip_says_why_and_leaves(plane):
    worker = plane.worker()
    await worker.attach(unavailable_reason="burnt", chip=None, model=None)
    attached = await plane.wait_for_event(WorkerAttached)
    assert attached.worker.unavailable_reason == "burnt"
    await worker.send(goodbye=worker_pb2.Goodbye(reason="burnt"))
    assert (await worker.status())[0] is grpc.StatusCode.OK


async def test_a_fault_that_ends_the_process_counts_whatever_became_of_its_epoch(plane):
    worker = plane.worker()
    await worker.attach()
    await join_group(plane, worker, epoch=5)
    plane.dispatcher.carry_out(ResetWorker("chip0", 11, 5, "a peer was lost"))
    kind = worker_pb2.FAULT_KIND_DEVICE
    for exiting, message in ((False, "late"), (True, "last")):
        fault = worker_pb2.Fault(
            term=TERM, group_epoch=5, kind=kind, message=message, exiting=exiting
        )
        await worker.send(fault=fault)
    found = await plane.wait_for_event(WorkerFaulted)
    assert (found.message, found.exiting, found.kind) == ("last", True, LossKind.DEVICE)


# ---------------------------------------------------------------- ends


async def test_goodbye_is_no_crash(plane):
    worker = plane.worker()
    await worker.attach()
    await worker.send(goodbye=worker_pb2.Goodbye(reason="SIGTERM"))
    lost = await plane.wait_for_event(WorkerLost)
    assert (lost.kind, lost.message) == (LossKind.GOODBYE, "SIGTERM")
    assert (await worker.status())[0] is grpc.StatusCode.OK
    assert plane.counters.streams_lost == 0


@pytest.mark.parametrize("end", ["cancel", "half-close"])
async def test_a_stream_that_ends_without_goodbye_is_a_crash(plane, end):
    """A pin: in Python gRPC a client's cancel and its half-close look the same to the server."""
    worker = plane.worker()
    await worker.attach()
    if end == "cancel":
        worker.call.cancel()
    else:
        await worker.call.done_writing()
    lost = await plane.wait_for_event(WorkerLost)
    assert (lost.kind, lost.incarnation) == (LossKind.STREAM, 11)
    assert plane.count(WorkerLost) == 1
    assert plane.dispatcher.attached_count == 0


async def test_a_killed_process_is_noticed_at_once(plane):
    """A pin: the kernel closes the socket, and the stream ends well before any heartbeat."""
    code = (
        "import asyncio\n"
        "from tests.fakes.dialling_worker import DiallingWorker\n"
        "async def main():\n"
        f"    await DiallingWorker({plane.port}).attach()\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220 - returns at once
    try:
        await plane.wait_for_event(WorkerAttached, timeout_s=20)
        os.kill(process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await plane.wait_for_event(WorkerLost)
        assert time.monotonic() - killed_at < 5.0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "kind",
    [
        {"hello": worker_pb2.Hello(worker_id="again")},
        {"result": worker_pb2.StepResult(term=TERM, group_epoch=1, token_count=[2], token_ids=[1])},
        {"ready": worker_pb2.Ready(term=TERM, group_epoch=1, blocks=0)},
    ],
    ids=["second hello", "columns", "no blocks"],
)
async def test_a_worker_that_breaks_the_protocol_loses_its_stream(plane, kind):
    worker = plane.worker()
    await worker.attach()
    await join_group(plane, worker)
    await worker.send(**kind)
    assert (await worker.status())[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await plane.wait_for_event(WorkerLost)).kind is LossKind.INTERNAL
    assert plane.counters.messages_refused == 1


async def test_a_message_over_the_limit_ends_the_stream(plane_with):
    async with plane_with(message_bytes_max=4096) as plane:
        worker = plane.worker()
        await worker.attach()
        await worker.send(goodbye=worker_pb2.Goodbye(reason="x" * 8192))
        assert (await worker.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await plane.wait_for_event(WorkerLost)).kind is LossKind.STREAM


async def test_a_worker_that_reads_nothing_loses_its_stream(plane):
    worker = plane.worker()
    await worker.attach()
    await join_group(plane, worker)
    plan = StepPlan("g0", 1, 1, extensions=((0, tuple(range(20_000))),))
    for _ in range(400):
        plane.dispatcher.carry_out(SendStep(("chip0",), plan))
        await asyncio.sleep(0)
        if plane.count(WorkerLost):
            break
    lost = await plane.wait_for_event(WorkerLost)
    assert "unread" in lost.message


async def test_shutdown_reaches_every_worker(plane):
    workers: list[DiallingWorker] = [plane.worker(f"chip{k}", 11 + k) for k in range(2)]
    for worker in workers:
        await worker.attach()
    plane.dispatcher.shut_down_workers("drained")
    for worker in workers:
        assert (await worker.read()).shutdown.reason == "drained"
