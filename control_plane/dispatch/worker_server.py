"""The gRPC server workers dial: admits them, then leaves each to its step stream."""

import hmac
from typing import Any, NoReturn

import anyio
import grpc
import structlog

from control_plane.dispatch import wire
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.step_stream import Context
from control_plane.errors import ConfigurationError, ProtocolError
from control_plane.message_guard import MessageGuard, refuse
from control_plane.scheduling.messages import WorkerInfo
from protos import worker_pb2

SERVICE_NAME = "polychip.v1.WorkerService"
HELLO_TIMEOUT_S = 5.0

WORKER_REFUSED = "worker.refused"

HeartbeatContext = grpc.aio.ServicerContext[
    worker_pb2.HeartbeatRequest, worker_pb2.HeartbeatResponse
]

_log = structlog.get_logger()


class WorkerServer:
    """Serves WorkerService; all methods on one event loop.

    join_token: None admits every worker that can reach the port.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        heartbeat_interval_s: float,
        lease_s: float,
        message_bytes_max: int,
        join_token: str | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._dispatcher = dispatcher
        self._heartbeat_interval_s = heartbeat_interval_s
        self._lease_s = lease_s
        self._join_token = join_token
        self._hello_timeout_s = hello_timeout_s
        self._server = grpc.aio.server(
            interceptors=[MessageGuard()], options=_server_options(message_bytes_max)
        )
        # Responses are bytes already: a step is serialized once for all ranks.
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Attach": grpc.stream_stream_rpc_method_handler(
                self._attach, request_deserializer=worker_pb2.AttachRequest.FromString
            ),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(
                self._heartbeat,
                request_deserializer=worker_pb2.HeartbeatRequest.FromString,
                response_serializer=worker_pb2.HeartbeatResponse.SerializeToString,
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),)
        )

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises ConfigurationError if it cannot be had."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound_port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen for workers on {address} (is the port in use?); choose another "
                f"--worker-port or --worker-host"
            ) from error
        await self._server.start()
        return bound_port

    async def stop(self, grace_s: float) -> None:
        """Refuses new streams at once and ends open ones after `grace_s` seconds."""
        await self._server.stop(grace_s)

    async def _attach(self, _requests: object, context: Context) -> None:
        worker = await self._admit(context)
        stream = self._dispatcher.attach(worker)
        try:
            stream.send(wire.encode_welcome(stream.term, self._heartbeat_interval_s, self._lease_s))
            self._dispatcher.announce(stream)
            await stream.run(context)
        finally:
            self._dispatcher.detach(stream)

    async def _admit(self, context: Context) -> WorkerInfo:
        """The worker behind a new stream; aborts the call of one that may not come in."""
        message = None
        with anyio.move_on_after(self._hello_timeout_s) as patience:
            try:
                message = await context.read()
            except ProtocolError as error:
                await refuse(context, error)
        if patience.cancelled_caught:
            # Either side may only have been slow: unlike a refusal, this is worth another try.
            await self._refuse(
                context,
                grpc.StatusCode.UNAVAILABLE,
                f"no Hello came within {self._hello_timeout_s:g} s; dial again",
            )
        if not isinstance(message, worker_pb2.AttachRequest) or not message.HasField("hello"):
            await self._refuse(
                context, grpc.StatusCode.FAILED_PRECONDITION, "a stream begins with Hello"
            )
        if self._join_token is not None and not hmac.compare_digest(
            message.hello.join_token.encode(), self._join_token.encode()
        ):
            await self._refuse(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                f"worker {message.hello.worker_id!r} has not the join token of this control plane; "
                f"give both the same --join-token-file",
            )
        try:
            return wire.decode_hello(message.hello)
        except ProtocolError as error:
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _refuse(self, context: Context, status: grpc.StatusCode, reason: str) -> NoReturn:
        """Ends the call."""
        self._dispatcher.counters.streams_refused += 1
        _log.warning(WORKER_REFUSED, peer=context.peer(), reason=reason)
        await context.abort(status, reason)
        raise AssertionError("abort returned")

    async def _heartbeat(
        self, request: worker_pb2.HeartbeatRequest, _context: HeartbeatContext
    ) -> worker_pb2.HeartbeatResponse:
        known = self._dispatcher.heartbeat(request.worker_id, request.incarnation, request.term)
        return worker_pb2.HeartbeatResponse(term=self._dispatcher.term, known=known)


def _server_options(message_bytes_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        # Two servers on one port would share the workers between them.
        ("grpc.so_reuseport", 0),
        # Half-open connections; frozen peers are found by heartbeats long before.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Workers ping as often; the default answers that with "too many pings".
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]
