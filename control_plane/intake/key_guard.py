"""Asks for an API key before anything of a call is read; health and reflection stay open."""

from collections.abc import Awaitable, Callable
from typing import NoReturn

import grpc
from typing_extensions import override

from control_plane.errors import Unauthenticated
from control_plane.intake.api_keys import ApiKeys
from control_plane.intake.grpc_errors import abort
from control_plane.message_guard import Context, Handler

AUTHORIZATION = "authorization"


class KeyGuard(grpc.aio.ServerInterceptor):
    """services: full names of those whose every method asks for a key; UNAUTHENTICATED without.

    Must come before interceptors that look at the message.
    """

    def __init__(self, keys: ApiKeys, services: tuple[str, ...]) -> None:
        self._keys = keys
        self._prefixes = tuple(f"/{service}/" for service in services)

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        if handler_call_details.method.startswith(self._prefixes):
            try:
                self._keys.check(_authorization(handler_call_details))
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == AUTHORIZATION:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _refusal(error: Unauthenticated) -> Handler:
    """A handler that answers any kind of call; without a deserializer it takes any bytes."""

    async def refuse(_request: object, context: Context) -> NoReturn:
        await abort(context, error)

    return grpc.unary_stream_rpc_method_handler(refuse)
