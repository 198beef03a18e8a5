"""Refuses bytes that are no message of the method called; both gRPC servers install it.

Without it gRPC calls such bytes a failure of the server: UNKNOWN, and a traceback in the log.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from typing_extensions import override

from control_plane.errors import ProtocolError

MESSAGE_MALFORMED = "grpc.message_malformed"

# Handlers of every service pass here: a named tuple at run time, whatever its stub says, or None
# for a method that does not exist.
Handler = Any
Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger()


class MessageGuard(grpc.aio.ServerInterceptor):
    """Ends a call whose request cannot be decoded with INVALID_ARGUMENT.

    Takes handlers whose single request is answered by a coroutine, and streams of requests: these
    see ProtocolError where they read; one answered by an async generator may let it through.
    """

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        decode = _decoder(handler.request_deserializer)
        if handler.request_streaming:
            if inspect.isasyncgenfunction(handler.stream_stream):
                handler = handler._replace(stream_stream=_guarded_stream(handler.stream_stream))
            return handler._replace(request_deserializer=decode)
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        guarded = _guarded_call(getattr(handler, kind))
        # An exception of a deserializer never reaches the behaviour, so it is handed over.
        return handler._replace(request_deserializer=_returning_errors(decode), **{kind: guarded})


async def refuse(context: Context, error: ProtocolError) -> NoReturn:
    """Ends the call; raises, as gRPC's own abort does."""
    _log.debug(MESSAGE_MALFORMED, peer=context.peer(), error=str(error))
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort returned")


def _decoder(deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def decode(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise ProtocolError(
                f"{len(data)} bytes are no message of this method ({error}); send one as its "
                "protobuf definition has it"
            ) from error

    return decode


def _returning_errors(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def decode_or_error(data: bytes) -> object:
        try:
            return decode(data)
        except ProtocolError as error:
            return error

    return decode_or_error


def _guarded_call(
    behaviour: Callable[[object, Context], Awaitable[object]],
) -> Callable[[object, Context], Awaitable[object]]:
    async def answer(request: object, context: Context) -> object:
        if isinstance(request, ProtocolError):
            await refuse(context, request)
        answering = behaviour(request, context)
        del request  # it may be large, and the answer may take minutes
        return await answering

    return answer


def _guarded_stream(
    behaviour: Callable[[object, Context], AsyncIterator[object]],
) -> Callable[[object, Context], AsyncIterator[object]]:
    async def answer(requests: object, context: Context) -> AsyncIterator[object]:
        try:
            async for response in behaviour(requests, context):
                yield response
        except ProtocolError as error:
            await refuse(context, error)

    return answer
