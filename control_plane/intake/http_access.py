"""What stands before the HTTP endpoints: the request's id on every response, and the API keys."""

from contextlib import suppress
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.errors import Unauthenticated
from control_plane.intake.api_keys import ApiKeys
from control_plane.intake.http_body import BodyReader, parting
from control_plane.intake.http_errors import error_response

GUARDED_PATHS = ("/v1/", "/admin/")
"""Health and metrics are for load balancers and monitors, which have no key."""
REQUEST_ID_CHARACTERS_MAX = 128


def with_api_keys(app: ASGIApp, keys: ApiKeys, bodies: BodyReader) -> ASGIApp:
    """Asks for a key before anything else is looked at."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED_PATHS):
            try:
                keys.check(Headers(scope=scope).get("authorization"))
            except Unauthenticated as error:
                request = Request(scope, receive)
                with suppress(ClientDisconnect):
                    await bodies.drop(request)
                await parting(request, error_response(error))(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def with_request_id(app: ASGIApp) -> ASGIApp:
    """Puts X-Request-Id on every response: the client's own, if it sent a short one, or a new."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        usable = 0 < len(given) <= REQUEST_ID_CHARACTERS_MAX
        usable = usable and given.isascii() and given.isprintable()
        request_id = given if usable else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = list(message.get("headers", ()))
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await app(scope, receive, send_with_id)

    return wrapped
