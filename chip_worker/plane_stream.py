"""One Attach stream from Hello to its end: messages both ways, heartbeats beside it, the lease."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic, monotonic_ns

import anyio
import anyio.lowlevel
import grpc
import structlog

from chip_worker.config import WorkerConfig
from chip_worker.errors import Unreachable, WorkerError
from chip_worker.inbox import Inbox, InboxFull
from chip_worker.outbox import MESSAGES_MAX, Outbox
from chip_worker.step_wire import MalformedMessage
from chip_worker.wire import Identity, decode_command, encode_hello
from protos import worker_pb2, worker_pb2_grpc

ATTACH_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 2.0
VERDICT_WAIT_S = 0.2
"""How long a lapsed stream may take to show that the control plane has ended it."""

HEARTBEAT_MISSED = "worker.heartbeat_missed"

_LOCAL_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)

AttachCall = grpc.aio.StreamStreamCall[worker_pb2.AttachRequest, worker_pb2.AttachResponse]

_log = structlog.get_logger()


class StreamEnded(Unreachable):
    """The stream is over; registering again may help."""


class _GoodbyeTaken(StreamEnded):
    """The control plane has read the worker's last message."""


class Refused(WorkerError):
    """The control plane does not want this process; trying again does not help."""


class GivenUp(Refused):
    """The control plane gave this process up, maybe for another one of its name."""


class PlaneStream:
    """A stream to the control plane; `attach` once, then `serve` once, on one event loop.

    address: where it is dialled, HOST:PORT.
    """

    def __init__(
        self,
        config: WorkerConfig,
        address: str,
        identity: Identity,
        inbox: Inbox,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.term = 0
        self.outbox = Outbox()
        self._config = config
        self._identity = identity
        self._inbox = inbox
        self._clock = clock
        self._channel = grpc.aio.insecure_channel(
            address, options=_channel_options(config.message_bytes_max)
        )
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(
            self._channel
        )
        self._stub = stub
        self._call: AttachCall | None = None
        self._leaving = False
        self._heartbeat_interval_s = 0.0
        self._lease_s = 0.0

    async def attach(self, term_highest: int) -> None:
        """Introduces the worker. Raises StreamEnded or Refused."""
        call = self._call = self._stub.Attach()
        hello = encode_hello(self._identity, term_highest, self._config.join_token)
        message: object = None
        with anyio.move_on_after(ATTACH_TIMEOUT_S):
            try:
                await call.write(hello)
                message = await call.read()
            except _LOCAL_ERRORS:
                message = grpc.aio.EOF
            except asyncio.CancelledError:
                # gRPC may raise one of its own, which no scope takes for what it asked for.
                await anyio.lowlevel.checkpoint_if_cancelled()
                raise
        if message is grpc.aio.EOF:
            raise await _end_of(call)
        if not isinstance(message, worker_pb2.AttachResponse) or not message.HasField("welcome"):
            raise StreamEnded(f"no Welcome within {ATTACH_TIMEOUT_S} s")
        welcome = message.welcome
        if welcome.term < term_highest:
            raise StreamEnded(
                f"the control plane has term {welcome.term}, this worker has seen {term_highest}: "
                f"it is an older one"
            )
        self.term = welcome.term
        self._heartbeat_interval_s = welcome.heartbeat_interval_s
        self._lease_s = welcome.lease_s

    async def serve(self, alive: Callable[[], None]) -> None:
        """Carries messages until Goodbye was taken; `alive` is called at every answered heartbeat.

        Raises StreamEnded or Refused if the stream ends otherwise.
        """
        ends: list[WorkerError] = []
        async with anyio.create_task_group() as tasks:

            async def run(part: Callable[[], Awaitable[WorkerError]]) -> None:
                ends.append(await part())
                tasks.cancel_scope.cancel()

            tasks.start_soon(run, self._read)
            tasks.start_soon(run, self._write)
            tasks.start_soon(run, lambda: self._beat(alive))
            tasks.start_soon(run, self._watch_outbox)
        if not isinstance(ends[0], _GoodbyeTaken):
            raise ends[0]

    async def close(self) -> None:
        """Ends what is open; the control plane sees a stream without Goodbye unless it was sent."""
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _read(self) -> WorkerError:
        assert self._call is not None
        while True:
            try:
                message = await self._call.read()
            except _LOCAL_ERRORS:
                message = grpc.aio.EOF
            if not isinstance(message, worker_pb2.AttachResponse):
                return await self._end()
            try:
                kv_groups_count = len(self._identity.kv_windows)
                self._inbox.offer(decode_command(message, monotonic_ns(), kv_groups_count))
            except (MalformedMessage, InboxFull) as error:
                return StreamEnded(str(error))

    async def _write(self) -> WorkerError:
        assert self._call is not None
        while True:
            message = await self.outbox.get()
            try:
                # Before it is written: the answer may be there before the write returns.
                self._leaving = message.HasField("goodbye")
                await self._call.write(message)
                if self._leaving:
                    await self._call.done_writing()
            except _LOCAL_ERRORS:
                return await self._end()
            if self._leaving:
                # The status that follows proves that the control plane has read it all.
                with anyio.move_on_after(GOODBYE_TIMEOUT_S):
                    await self._call.code()
                return _GoodbyeTaken()

    async def _end(self) -> WorkerError:
        assert self._call is not None
        if self._leaving and await self._call.code() is grpc.StatusCode.OK:
            return _GoodbyeTaken()
        return await _end_of(self._call)

    async def _watch_outbox(self) -> WorkerError:
        await self.outbox.wait_overflowed()
        return StreamEnded(f"the control plane does not read: {MESSAGES_MAX} messages wait")

    async def _beat(self, alive: Callable[[], None]) -> WorkerError:
        """Heartbeats until the lease lapses, counted from the sending of the last answered one."""
        answered_at = self._clock()
        while True:
            sent_at = self._clock()
            lease_left_s = answered_at + self._lease_s - sent_at
            if lease_left_s <= 0:
                return await self._lapse()
            timeout_s = min(lease_left_s, max(self._heartbeat_interval_s, self._lease_s / 2))
            try:
                response = await self._stub.Heartbeat(self._heartbeat_message(), timeout=timeout_s)
            except _LOCAL_ERRORS as error:
                _log.debug(HEARTBEAT_MISSED, error=str(error))
            else:
                if not response.known:
                    return StreamEnded("the control plane does not know this process any more")
                answered_at = sent_at
                alive()
            await anyio.sleep(min(self._heartbeat_interval_s, self._lease_s))

    async def _lapse(self) -> WorkerError:
        """Ends a stream whose lease lapsed, as the control plane ended it if it did.

        A process that was frozen finds here what it was told meanwhile.
        """
        assert self._call is not None
        with anyio.move_on_after(VERDICT_WAIT_S):
            return await _end_of(self._call)
        return StreamEnded(f"no heartbeat was answered for {self._lease_s} s")

    def _heartbeat_message(self) -> worker_pb2.HeartbeatRequest:
        form = self._inbox.form
        step_started, step_done = self._inbox.steps
        return worker_pb2.HeartbeatRequest(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            term=self.term,
            group_epoch=form.epoch if form is not None else 0,
            step_started=step_started,
            step_done=step_done,
        )


async def _end_of(call: AttachCall) -> WorkerError:
    """What the status of an ended call means."""
    code, details = await call.code(), await call.details()
    message = f"{code.name}: {details}" if code is not grpc.StatusCode.OK else "the stream ended"
    if code is grpc.StatusCode.ABORTED:
        return GivenUp(message)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Refused(f"{message}; does --control-plane name the worker port?")
    if code in _REFUSALS:
        return Refused(message)
    return StreamEnded(message)


def _channel_options(message_bytes_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        # Half-open connections; a frozen control plane is found by heartbeats long before.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Reconnecting is paced by the connection, not by gRPC below it.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
