"""Counts the requests of the client server that are in memory among what all clients may send.

KeyGuard --> MessageBudget --> MessageGuard --> InferenceServer, AdminServer
"""

from collections.abc import Awaitable, Callable

import grpc
from typing_extensions import override

from control_plane.errors import QueueFull
from control_plane.intake.byte_budget import ReadBudget
from control_plane.intake.grpc_errors import abort
from control_plane.message_guard import Context, Handler


class MessageBudget(grpc.aio.ServerInterceptor):
    """Ends a call whose request is too much with RESOURCE_EXHAUSTED, before it is decoded.

    Takes handlers whose single request is answered by a coroutine; streams of requests, which are
    health's and reflection's own, pass. A request counts until its call ends: gRPC keeps its bytes
    so long, whatever becomes of the message.
    """

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(
            request_deserializer=self._counted(handler.request_deserializer),
            **{kind: self._answering(getattr(handler, kind))},
        )

    def _counted(self, decode: Callable[[bytes], object]) -> Callable[[bytes], "_Counted"]:
        def counted(data: bytes) -> _Counted:
            try:
                self._budget.check(len(data))
            except QueueFull as error:
                # An exception of a deserializer never reaches the behaviour: it is handed over.
                return _Counted(error, 0)
            return _Counted(decode(data), len(data))

        return counted

    def _answering(
        self, behaviour: Callable[[object, Context], Awaitable[object]]
    ) -> Callable[["_Counted", Context], Awaitable[object]]:
        async def answer(counted: _Counted, context: Context) -> object:
            # Nothing else ran since there was room for it.
            self._budget.take(counted.bytes_count)
            try:
                if isinstance(counted.message, QueueFull):
                    await abort(context, counted.message)
                return await behaviour(counted.handed_over(), context)
            finally:
                self._budget.release(counted.bytes_count)

        return answer


class _Counted:
    """A decoded request on its way to the behaviour, which alone may keep it: gRPC keeps this."""

    def __init__(self, message: object, bytes_count: int) -> None:
        self.message = message
        self.bytes_count = bytes_count

    def handed_over(self) -> object:
        message, self.message = self.message, None
        return message
