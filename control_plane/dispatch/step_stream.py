"""One worker's Attach stream after Welcome: bytes out in order, reports in, fenced by epoch.

A stream that ends without Goodbye is a crash: in Python gRPC a cancel looks like a clean end.
"""

import asyncio
from collections.abc import Callable

import anyio
import grpc
import structlog

from control_plane.dispatch import wire
from control_plane.dispatch.wire import Place
from control_plane.errors import ProtocolError
from control_plane.metrics import DispatchCounters
from control_plane.scheduling.messages import Event, LossKind, WorkerInfo, WorkerLost
from protos import worker_pb2

# Steps in flight are bounded by the pipeline depth; a worker this far behind no longer reads.
OUTBOX_MESSAGES_MAX = 64
WRITE_DEADLINE_S = 5.0
"""Of one message; a frozen worker is found by its heartbeats before."""

MESSAGE_STALE = "worker.message_stale"
MESSAGE_REFUSED = "worker.message_refused"

Context = grpc.aio.ServicerContext[worker_pb2.AttachRequest, bytes]

_log = structlog.get_logger()


class StepStream:
    """The stream of one worker process; lives on the event loop of its server.

    place: what the worker was last told to be; reports of any other epoch are dropped.
    """

    def __init__(
        self,
        worker: WorkerInfo,
        term: int,
        post: Callable[[Event], None],
        counters: DispatchCounters,
    ) -> None:
        self.worker = worker
        self.term = term
        self.place: Place | None = None
        self._post = post
        self._counters = counters
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(OUTBOX_MESSAGES_MAX)
        self._scope = anyio.CancelScope()
        self._closed: tuple[grpc.StatusCode, str] | None = None
        self._lost = False

    def send(self, message: bytes) -> None:
        """Queues a message; a worker that lets the queue fill up loses its stream."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.close(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the worker left {OUTBOX_MESSAGES_MAX} messages unread",
            )

    def close(self, status: grpc.StatusCode, reason: str) -> None:
        """Ends the stream with a status; the first close counts."""
        if self._closed is None:
            self._closed = (status, reason)
            self._scope.cancel()

    def report_lost(self, kind: LossKind, message: str) -> None:
        """Posts WorkerLost, once."""
        if not self._lost:
            self._lost = True
            if kind is not LossKind.GOODBYE:
                self._counters.streams_lost += 1
            self._post(WorkerLost(self.worker.worker_id, self.worker.incarnation, kind, message))

    async def run(self, context: Context) -> None:
        """Carries messages both ways until either side ends the stream, then reports the loss."""
        kind, message = LossKind.STREAM, "the stream was cancelled"
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write, context)
                    kind, message = await self._read(context)
                    tasks.cancel_scope.cancel()
            if self._closed is not None:
                message = self._closed[1]
        finally:
            self.report_lost(kind, message)
        if self._closed is not None:
            await context.abort(*self._closed)

    async def _write(self, context: Context) -> None:
        try:
            while True:
                message = await self._outbox.get()
                # Not to be left in the middle: gRPC sends no status while a message is on its way,
                # and the worker would wait for one.
                with anyio.move_on_after(WRITE_DEADLINE_S, shield=True) as patience:
                    await context.write(message)
                if patience.cancelled_caught:
                    self.close(
                        grpc.StatusCode.UNAVAILABLE,
                        f"the worker took no message for {WRITE_DEADLINE_S:g} s",
                    )
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            self.close(grpc.StatusCode.UNAVAILABLE, f"the stream cannot be written: {error}")

    async def _read(self, context: Context) -> tuple[LossKind, str]:
        """Posts what arrives. Returns why the stream is over."""
        while True:
            try:
                message = await context.read()
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                return LossKind.STREAM, f"the stream cannot be read: {error}"
            except ProtocolError as error:
                return self._refuse(error)
            if not isinstance(message, worker_pb2.AttachRequest):
                return LossKind.STREAM, "the stream ended without Goodbye"
            if message.WhichOneof("kind") == "goodbye":
                return LossKind.GOODBYE, message.goodbye.reason
            try:
                self._take(message)
            except ProtocolError as error:
                return self._refuse(error)

    def _refuse(self, error: ProtocolError) -> tuple[LossKind, str]:
        self._counters.messages_refused += 1
        _log.error(MESSAGE_REFUSED, worker=self.worker.worker_id, error=str(error))
        self.close(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return LossKind.INTERNAL, str(error)

    def _take(self, message: worker_pb2.AttachRequest) -> None:
        term, epoch = wire.decode_fence(message)
        place = self.place
        if term == self.term and message.fault.exiting:
            # It is about the process: it counts whatever became of the epoch.
            self._post(wire.decode_fault(message.fault, self.worker))
            return
        if term != self.term or place is None or epoch != place.epoch:
            self._counters.messages_stale += 1
            _log.debug(
                MESSAGE_STALE,
                worker=self.worker.worker_id,
                kind=message.WhichOneof("kind"),
                term=term,
                epoch=epoch,
            )
            return
        event = wire.decode_report(message, self.worker, place)
        if event is None:
            self._counters.steps_acknowledged += len(message.ack.times)
        else:
            self._post(event)
