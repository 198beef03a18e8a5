"""The client library: gRPC generation that survives a lost connection, looking, steering.

Used by the commands of `polychip`, by the launcher and by tests; applications may use it as well.
The one module of the top layer that knows the messages.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import httpx
import tenacity
from google.protobuf.message import Message as ProtobufMessage

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

MESSAGE_BYTES_MAX = 64 << 20
RESUMES_WITHOUT_PROGRESS_MAX = 5
RECONNECT_DEADLINE_S = 60.0
CALL_DEADLINE_S = 30.0

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


class ClientError(Exception):
    """A call failed; the message is meant for people."""


class ServiceUnreachable(ClientError):
    """Nothing answers at the address."""


class ServiceRefused(ClientError):
    """The service answered with an error; `code` is the name of the gRPC status."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Message:
    """One message of a conversation; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Generation:
    """What to generate. prompt: text, token ids, or a conversation. None: the server's default."""

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    model: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class Usage:
    """Counts and facts of a finished answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    group: str
    failovers: int
    retractions: int
    seed: int


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. first_index: place of token_ids[0] in the output.

    finish_reason ("stop" or "length") and usage are set in the last piece only.
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None


class PolychipClient:
    """A blocking client of one service; close it, or use it as a context manager.

    Every method raises ServiceUnreachable or ServiceRefused.
    """

    def __init__(self, host: str, grpc_port: int) -> None:
        self.address = f"{host}:{grpc_port}"
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
        """Streams the answer. Closing the iterator cancels the request.

        A connection lost in mid-answer is made again, for up to RECONNECT_DEADLINE_S, and the
        answer goes on where it stopped: no token is repeated or skipped. `on_lost` is called
        once for each loss.
        """
        request = _request(generation)
        resumes_left = RESUMES_WITHOUT_PROGRESS_MAX
        received = 0
        while True:
            try:
                for piece in self._stream(request):
                    if piece.token_ids:
                        received += len(piece.token_ids)
                        resumes_left = RESUMES_WITHOUT_PROGRESS_MAX
                        request.resume_output_ids.extend(piece.token_ids)
                    yield piece
                return
            except grpc.RpcError as error:
                resumable = error.code() is grpc.StatusCode.UNAVAILABLE and received > 0
                if not resumable or resumes_left == 0:
                    raise _translated(error, self.address) from error
            if resumes_left == RESUMES_WITHOUT_PROGRESS_MAX:
                on_lost()
            resumes_left -= 1
            # The server may still hold the old request under its old name.
            request.request_id = f"resumed-{secrets.token_hex(8)}"
            self._reconnect()

    def cancel(self, request_id: str) -> bool:
        """Cancels a request; False if the service does not know it (any more)."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        try:
            return self._inference.Cancel(request, timeout=CALL_DEADLINE_S).found
        except grpc.RpcError as error:
            raise _translated(error, self.address) from error

    def model_info(self) -> dict[str, object]:
        """What is served: names, architecture, context_tokens, vocabulary_size, ..."""
        request = inference_pb2.GetModelInfoRequest()
        try:
            info = self._inference.GetModelInfo(request, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            raise _translated(error, self.address) from error
        lists = {"names": list(info.names), "end_token_ids": list(info.end_token_ids)}
        return {**_fields(info), **lists}

    def status(self) -> dict[str, object]:
        """Workers, groups and table sizes, in the shape of `polychip status --json`."""
        request = admin_pb2.GetStatusRequest()
        try:
            return status_of(self._admin.GetStatus(request, timeout=CALL_DEADLINE_S))
        except grpc.RpcError as error:
            raise _translated(error, self.address) from error

    def flush_cache(self) -> int:
        """Forgets every cached block that no request uses; the number of blocks freed."""
        request = admin_pb2.FlushCacheRequest()
        try:
            return self._admin.FlushCache(request, timeout=CALL_DEADLINE_S).blocks_freed
        except grpc.RpcError as error:
            raise _translated(error, self.address) from error

    def debug_logits(self, token_ids: Sequence[int], group: str = "") -> list[float]:
        """Float32 logits of the position after the ids; only of a service with --debug-api."""
        request = admin_pb2.DebugLogitsRequest(token_ids=token_ids, group=group)
        try:
            return list(self._admin.DebugLogits(request, timeout=10 * CALL_DEADLINE_S).logits)
        except grpc.RpcError as error:
            raise _translated(error, self.address) from error

    def _stream(self, request: inference_pb2.GenerateRequest) -> Iterator[Piece]:
        call = self._inference.Generate(request)
        try:
            for response in call:
                yield _piece(response)
        finally:
            call.cancel()

    def _reconnect(self) -> None:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ServiceUnreachable),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
            stop=tenacity.stop_after_delay(RECONNECT_DEADLINE_S),
            reraise=True,
        )
        retrying(self.model_info)


class AdminWatcher:
    """What the launcher needs of the admin service, without blocking its loop."""

    def __init__(self, host: str, grpc_port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"{host}:{grpc_port}", options=_channel_options())
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def close(self) -> None:
        """Closes the connection; running calls end."""
        await self._channel.close()

    async def status(self) -> dict[str, object] | None:
        """The status, or None while the service does not answer."""
        try:
            response = await self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=5.0)
        except grpc.aio.AioRpcError:
            return None
        return status_of(response)

    async def verdicts(self) -> AsyncIterator[tuple[str, int, str]]:
        """Workers declared frozen: name, process id, reason. Ends when the connection does."""
        try:
            async for verdict in self._admin.WatchVerdicts(admin_pb2.WatchVerdictsRequest()):
                yield verdict.worker_id, verdict.pid, verdict.reason
        except grpc.aio.AioRpcError:
            return


def health(host: str, http_port: int) -> tuple[int, str] | None:
    """Status code and body of /health; None if nothing answers."""
    try:
        response = httpx.get(f"http://{host}:{http_port}/health", timeout=5.0, trust_env=False)
    except httpx.TransportError:
        return None
    return response.status_code, response.text


def status_of(response: admin_pb2.GetStatusResponse) -> dict[str, object]:
    """The status as plain values."""
    return {
        "version": response.version,
        "term": response.term,
        "workers": [_fields(worker) for worker in response.workers],
        "groups": [
            {**_fields(group), "ranks": list(group.ranks), "blocks": _fields(group.blocks)}
            for group in response.groups
        ],
        "requests": _fields(response.requests),
        "generated_tokens": response.generated_tokens,
        "failovers": response.failovers,
    }


def _fields(message: ProtobufMessage) -> dict[str, object]:
    """Every field of a flat message, present or not, under its own name."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.enable_http_proxy", 0),
    ]


def _request(generation: Generation) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(
        stop_token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
        logprobs=generation.logprobs,
    )
    if generation.temperature is not None:
        sampling.temperature = generation.temperature
    if generation.max_tokens is not None:
        sampling.max_tokens = generation.max_tokens
    # Drawn here if not given: a resumed request must go on with the same draws.
    sampling.seed = secrets.randbits(63) if generation.seed is None else generation.seed
    request = inference_pb2.GenerateRequest(
        request_id=generation.request_id, model=generation.model, sampling=sampling
    )
    if isinstance(generation.prompt, str):
        request.prompt = generation.prompt
        return request
    request.prompt_ids.SetInParent()
    for part in generation.prompt:
        if isinstance(part, Message):
            request.chat.messages.add(role=part.role, content=part.content)
        else:
            request.prompt_ids.ids.append(part)
    return request


def _piece(response: inference_pb2.GenerateResponse) -> Piece:
    usage = None
    if response.HasField("usage"):
        names = Usage.__dataclass_fields__
        usage = Usage(**{name: getattr(response.usage, name) for name in names})
    return Piece(
        first_index=response.first_index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(response.logprobs),
        prompt_ids=tuple(response.prompt_ids),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        usage=usage,
    )


def _translated(error: grpc.RpcError, address: str) -> ClientError:
    """The error in words. An answer of the service carries details, a lost connection none."""
    trailing = error.trailing_metadata() or ()
    answered = any(item.key == "grpc-status-details-bin" for item in trailing)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not answered:
        details = error.details() or ""
        # "Refused" says no more than we do; a name that does not resolve is worth showing.
        reason = "" if "Connection refused" in details else f" ({details})"
        return ServiceUnreachable(f"nothing answers at {address}{reason}")
    return ServiceRefused(error.details() or error.code().name, error.code().name)
