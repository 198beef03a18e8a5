"""The client library: gRPC generation that survives a lost connection, looking, steering.

Used by the commands of `polychip`, by the launcher and by tests; applications may use it as well.
"""

import http.client
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message as ProtobufMessage

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from scripts.client_wire import ResumableAnswer, model_info_of, status_of
from scripts.generation import Generation, Piece

MESSAGE_BYTES_MAX = 64 << 20
RECONNECT_DEADLINE_S = 60.0
RESUME_PAUSE_S_MIN = 0.1
RESUME_PAUSE_S_MAX = 2.0
CALL_DEADLINE_S = 30.0
WATCHER_DEADLINE_S = 5.0

Metadata = tuple[tuple[str, str], ...]
Response = TypeVar("Response")


class ClientError(Exception):
    """A call failed; the message is meant for people."""


class ServiceUnreachable(ClientError):
    """Nothing answers at the address."""


class ServiceRefused(ClientError):
    """The service answered with an error; `code` is the name of the gRPC status."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class PolychipClient:
    """A blocking client of one service; close it, or use it as a context manager.

    api_key: if the service asks for one. reconnect_deadline_s: how long a lost service is waited
    for in mid-answer. Every method raises ServiceUnreachable or ServiceRefused.
    """

    def __init__(
        self,
        host: str,
        grpc_port: int,
        api_key: str | None = None,
        *,
        reconnect_deadline_s: float = RECONNECT_DEADLINE_S,
    ) -> None:
        self.address = f"{host}:{grpc_port}"
        self._metadata = _metadata(api_key)
        self._reconnect_deadline_s = reconnect_deadline_s
        self._channel = grpc.insecure_channel(self.address, options=_channel_options())
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> "PolychipClient":
        """The client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self.close()

    def close(self) -> None:
        """Closes the connection; running calls end."""
        self._channel.close()

    def generate(
        self, generation: Generation, on_lost: Callable[[], None] = lambda: None
    ) -> Iterator[Piece]:
        """Streams the answer, pieces of all choices as they come. Closing the iterator cancels it.

        A service lost in mid-answer is tried again, with pauses, until reconnect_deadline_s passed
        without anything new, and every choice goes on where it stopped: no token is repeated or
        skipped. `on_lost` is called once for each loss.
        """
        answer = ResumableAnswer(generation)
        patience = _Patience(generation.deadline_s, self._reconnect_deadline_s)
        while True:
            progress_count = answer.progress_count
            try:
                yield from self._stream(answer, patience.remaining_s())
                return
            except grpc.RpcError as error:
                if answer.progress_count > progress_count:
                    patience.renew()
                lost = error.code() is grpc.StatusCode.UNAVAILABLE and answer.started
                if not lost or patience.is_over():
                    raise _translated(error, self.address) from error
            if patience.pauses_count == 0:
                on_lost()
            patience.pause()

    def cancel(self, request_id: str) -> bool:
        """Cancels a request; False if the service does not know it (any more)."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        return self._call(self._inference.Cancel, request).found

    def model_info(self) -> dict[str, object]:
        """What is served: names, architecture, context_tokens, vocabulary_size, ..."""
        request = inference_pb2.GetModelInfoRequest()
        return model_info_of(self._call(self._inference.GetModelInfo, request))

    def status(self) -> dict[str, object]:
        """Workers, groups and table sizes, in the shape of `polychip status --json`."""
        return status_of(self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest()))

    def flush_cache(self) -> int:
        """Forgets every cached block that no request uses; the number of blocks freed."""
        return self._call(self._admin.FlushCache, admin_pb2.FlushCacheRequest()).blocks_freed

    def debug_logits(self, token_ids: Sequence[int], group: str = "") -> list[float]:
        """Float32 logits of the position after the ids; only of a service with --debug-api."""
        request = admin_pb2.DebugLogitsRequest(token_ids=token_ids, group=group)
        return list(self._call(self._admin.DebugLogits, request, 10 * CALL_DEADLINE_S).logits)

    def _call(
        self,
        method: Callable[..., Response],
        request: ProtobufMessage,
        timeout_s: float = CALL_DEADLINE_S,
    ) -> Response:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translated(error, self.address) from error

    def _stream(self, answer: ResumableAnswer, timeout_s: float | None) -> Iterator[Piece]:
        call = self._inference.Generate(
            answer.next_request(), timeout=timeout_s, metadata=self._metadata
        )
        try:
            for response in call:
                if (piece := answer.take(response)) is not None:
                    yield piece
        finally:
            call.cancel()


class _Patience:
    """How long a lost service is tried again, and the growing pauses between the tries; seconds.

    deadline_s: of the whole answer. lost_s_max: from a loss until something new comes.
    """

    def __init__(self, deadline_s: float | None, lost_s_max: float) -> None:
        self.pauses_count = 0
        """Since something new came."""
        self._ends = None if deadline_s is None else time.monotonic() + deadline_s
        self._lost_s_max = lost_s_max
        self._lost_at: float | None = None
        self._random = random.SystemRandom()

    def remaining_s(self) -> float | None:
        """What is left to the whole answer; None if it has no deadline."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def renew(self) -> None:
        """Something new came."""
        self.pauses_count = 0
        self._lost_at = None

    def is_over(self) -> bool:
        """True once nothing new came for too long after a loss; the first question is the loss."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        return now - self._lost_at >= self._lost_s_max

    def pause(self) -> None:
        """Sleeps, longer each time; many clients of one service do not come back together."""
        longest_s = min(RESUME_PAUSE_S_MAX, RESUME_PAUSE_S_MIN * 2 ** min(self.pauses_count, 16))
        self.pauses_count += 1
        time.sleep(self._random.uniform(longest_s / 2, longest_s))


class Verdict(NamedTuple):
    """A worker's process that is frozen: whoever started it should kill it."""

    worker_id: str
    incarnation: int
    pid: int
    reason: str


class AdminWatcher:
    """What the launcher needs of the admin service, without blocking its loop."""

    def __init__(self, host: str, grpc_port: int, api_key: str | None = None) -> None:
        self._metadata = _metadata(api_key)
        self._channel = grpc.aio.insecure_channel(f"{host}:{grpc_port}", options=_channel_options())
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def close(self) -> None:
        """Closes the connection; running calls end."""
        await self._channel.close()

    async def status(self) -> dict[str, object] | None:
        """The status, or None while the service does not answer."""
        try:
            response = await self._admin.GetStatus(
                admin_pb2.GetStatusRequest(), timeout=WATCHER_DEADLINE_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return None
        return status_of(response)

    async def verdicts(self) -> AsyncIterator[Verdict]:
        """Workers declared frozen, recent ones first, which an earlier call may have told.

        Ends when the connection does.
        """
        try:
            request = admin_pb2.WatchVerdictsRequest()
            async for verdict in self._admin.WatchVerdicts(request, metadata=self._metadata):
                yield Verdict(verdict.worker_id, verdict.incarnation, verdict.pid, verdict.reason)
        except grpc.aio.AioRpcError:
            return


def health(host: str, http_port: int) -> tuple[int, str] | None:
    """Status code and body of /health; None if nothing answers."""
    # Of the standard library: what reads more than this takes longer to import than all else here.
    connection = http.client.HTTPConnection(host, http_port, timeout=WATCHER_DEADLINE_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _metadata(api_key: str | None) -> Metadata:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.enable_http_proxy", 0),
        # Else a service that comes back is found only after a pause that grew to minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def _translated(error: grpc.RpcError, address: str) -> ClientError:
    """The error in words. An answer of the service carries details, a lost connection none."""
    code, details = error.code(), error.details() or ""
    trailing = error.trailing_metadata() or ()
    answered = any(item.key == "grpc-status-details-bin" for item in trailing)
    if code is grpc.StatusCode.UNAVAILABLE and not answered:
        # "Refused" says no more than we do; a name that does not resolve is worth showing.
        reason = "" if "Connection refused" in details else f" ({details})"
        return ServiceUnreachable(f"nothing answers at {address}{reason}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not answered:
        details = (
            f"a message is too large: {details}; send a shorter prompt, or serve with a larger "
            "--client-message-bytes"
        )
    return ServiceRefused(details or code.name, code.name)
