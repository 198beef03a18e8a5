"""The HTTP endpoints as an ASGI application: OpenAI's, health and cache administration."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.config import ControlPlaneConfig
from control_plane.errors import RequestError
from control_plane.intake.admission import Admission, GenerationInput
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.http_answer import HttpAnswer
from control_plane.intake.http_errors import error_response, json_response, plain_error_response
from control_plane.intake.http_format import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    FormatOptions,
)
from control_plane.intake.http_schema import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationBody,
    chat_input,
    completion_input,
    read_body,
)
from control_plane.intake.model_card import ModelCard
from control_plane.intake.release import VERSION
from control_plane.intake.tokenizer import Tokenizer

LARGE_BODY_BYTES = 64 << 10
"""Parsing a larger body takes more than a millisecond and is done in a thread."""
DISCARDED_BODIES = 16
"""A refused body is read up to so many times the limit: most clients read only after writing."""
REQUEST_ID_CHARACTERS_MAX = 128
CLIENT_GONE_STATUS = 499
"""Never reaches the client, who left while sending."""


class BodyTooLarge(Exception):
    """The body exceeds the limit."""


class BodyStalled(Exception):
    """The client stopped in the middle of the body."""


class HttpApp:
    """wall_clock: seconds since 1970, for the `created` fields."""

    def __init__(
        self,
        config: ControlPlaneConfig,
        card: ModelCard,
        admission: Admission,
        book: AnswerBook,
        tokenizer: Tokenizer,
        wall_clock: Callable[[], float],
    ) -> None:
        self._body_bytes_max = config.http_body_bytes_max
        self._stall_s = config.stream_buffer_stall_s
        self._card = card
        self._admission = admission
        self._book = book
        self._tokenizer = tokenizer
        self._wall_clock = wall_clock
        self._created = int(wall_clock())

    def asgi(self) -> ASGIApp:
        """The application to serve."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/admin/cache/flush", self._flush_cache, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            RequestError: self._refused,
            BodyTooLarge: self._body_too_large,
            BodyStalled: self._body_stalled,
            ClientDisconnect: self._client_gone,
            HTTPException: self._no_such_endpoint,
            Exception: self._broken,
        }
        return with_request_id(Starlette(routes=routes, exception_handlers=handlers))

    # ---------------------------------------------------------------- endpoints

    async def _completions(self, request: Request) -> HttpAnswer:
        body, reserved = await self._read(request, CompletionBody)
        wanted = completion_input(body, reserved, f"cmpl-{uuid4().hex}")
        return self._answer(body, wanted, CompletionFormat)

    async def _chat_completions(self, request: Request) -> HttpAnswer:
        body, reserved = await self._read(request, ChatBody)
        wanted = chat_input(body, reserved, f"chatcmpl-{uuid4().hex}")
        return self._answer(body, wanted, ChatFormat)

    async def _models(self, _request: Request) -> Response:
        models = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "polychip",
                "max_model_len": self._card.context_tokens,
            }
            for name in self._card.names
        ]
        return json_response({"object": "list", "data": models})

    async def _health(self, _request: Request) -> Response:
        groups = self._book.serving_group_ids
        state = "serving" if groups else "draining" if self._book.refusal else "not serving"
        content = {"status": state, "groups": groups, "version": VERSION}
        return json_response(content, 200 if groups else 503)

    async def _flush_cache(self, _request: Request) -> Response:
        return json_response({"blocks_freed": await self._book.flush_cache()})

    # ---------------------------------------------------------------- generation

    def _answer(
        self, body: GenerationBody, wanted: GenerationInput, kind: type[AnswerFormat]
    ) -> HttpAnswer:
        options = FormatOptions(
            model_name=body.model or self._card.name,
            created=int(self._wall_clock()),
            include_usage=body.wants_usage_chunk(),
            return_token_ids=bool(body.return_token_ids),
        )
        return HttpAnswer(
            self._admission,
            self._book,
            wanted,
            lambda request: kind(request, options, self._tokenizer),
            streamed=bool(body.stream),
            stall_s=self._stall_s,
        )

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body, dict[str, object]]:
        raw = await self._read_bytes(request)
        if len(raw) > LARGE_BODY_BYTES:
            return await anyio.to_thread.run_sync(read_body, raw, kind)
        return read_body(raw, kind)

    async def _read_bytes(self, request: Request) -> bytes:
        parts: list[bytes] = []
        bytes_count = 0
        stream = aiter(request.stream())
        while (part := await self._next_part(stream)) is not None:
            bytes_count += len(part)
            if bytes_count <= self._body_bytes_max:
                parts.append(part)
            elif bytes_count > DISCARDED_BODIES * self._body_bytes_max:
                break
        if bytes_count > self._body_bytes_max:
            raise BodyTooLarge
        return b"".join(parts)

    async def _next_part(self, stream: AsyncIterator[bytes]) -> bytes | None:
        try:
            with anyio.fail_after(self._stall_s):
                return await anext(stream, None)
        except TimeoutError as error:
            raise BodyStalled from error

    # ---------------------------------------------------------------- errors

    async def _refused(self, _request: Request, error: RequestError) -> Response:
        return error_response(error)

    async def _body_too_large(self, _request: Request, _error: BodyTooLarge) -> Response:
        return plain_error_response(
            413,
            f"body: more than {self._body_bytes_max} bytes; send a shorter prompt",
            "BODY_TOO_LARGE",
            "body",
        )

    async def _body_stalled(self, _request: Request, _error: BodyStalled) -> Response:
        return plain_error_response(
            408,
            f"body: nothing of it came for {self._stall_s:g} s; send the request again",
            "BODY_STALLED",
            "body",
        )

    async def _client_gone(self, _request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    async def _no_such_endpoint(self, request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        code = "METHOD_NOT_ALLOWED" if error.status_code == 405 else "NOT_FOUND"
        response = plain_error_response(error.status_code, message, code)
        response.headers.update(error.headers or {})
        return response

    async def _broken(self, _request: Request, _error: Exception) -> Response:
        """A mistake of ours; the log has the rest."""
        return plain_error_response(500, "the server failed; its log says why", "INTERNAL")


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
