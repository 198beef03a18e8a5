"""One generation over HTTP: waits for the answer and watches whether the client is still there."""

from collections.abc import Callable
from contextlib import suppress

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from control_plane.errors import RequestError
from control_plane.intake.admitted import Admitted
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.generation import Generation
from control_plane.intake.http_body import HeldBody
from control_plane.intake.http_errors import OWN_NAMES, error_object, error_response
from control_plane.intake.http_format import AnswerFormat
from control_plane.intake.http_json import dump
from control_plane.intake.http_schema import HttpCall

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to hold events back
]
JSON_HEADERS = [(b"content-type", b"application/json")]
PROTOCOL = "http"
INLINE_BODY_BYTES_MAX = 64 << 10
"""Parsing a larger body takes more than a millisecond and is done in a thread."""
INLINE_ENTRIES_MAX = 1000
"""Writing more log-probabilities takes milliseconds and is done in a thread."""
SENT_BYTES_MAX = 1 << 18
"""Handed to the server at once: a client that reads slowly takes them in time."""


class HttpAnswer:
    """An ASGI response. A client that leaves, or does not read for `stall_s`, ends its request."""

    def __init__(
        self,
        book: AnswerBook,
        request_id: str,
        body: HeldBody,
        read: Callable[[bytes], HttpCall],
        make_format: Callable[[Admitted, HttpCall], AnswerFormat],
        stall_s: float,
    ) -> None:
        self._book = book
        self._request_id = request_id
        self._body = body
        self._read = read
        self._field_names = OWN_NAMES
        self._make_format = make_format
        self._stall_s = stall_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(self._stall_s):
                await send(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
            # On a timeout the response is left incomplete: the server closes the connection.
            with suppress(TimeoutError):
                try:
                    await self._answer(scope, receive, send_in_time)
                except RequestError as error:
                    await self._send_error(error, scope, receive, send_in_time)
            tasks.cancel_scope.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The call is in progress until its response is sent: a drain waits so long."""
        with self._body, self._book.open(self._request_id, PROTOCOL) as generation:
            call = await self._parsed()
            self._field_names = call.field_names
            await generation.start(call.wanted)
            call = call.without_prompts()
            layout = self._make_format(generation.admitted, call)
            if call.streamed:
                await self._stream(generation, layout, send)
                return
            while (piece := await generation.next_piece()) is not None:
                layout.gather(piece)
            if layout.whole_size <= INLINE_ENTRIES_MAX:
                content = b"".join(layout.whole())
                await Response(content, media_type="application/json")(scope, receive, send)
            else:
                await self._send_long(layout, send)

    async def _parsed(self) -> HttpCall:
        with self._body as body:
            if len(body.raw) <= INLINE_BODY_BYTES_MAX:
                return self._read(body.raw)
            return await anyio.to_thread.run_sync(self._read, body.raw)

    async def _send_long(self, layout: AnswerFormat, send: Send) -> None:
        """A whole answer part by part, so that only one is in memory."""
        await self._begin(JSON_HEADERS, send)
        parts = layout.whole()
        while part := await anyio.to_thread.run_sync(next, parts, b""):
            await _send_part(part, send)
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, generation: Generation, layout: AnswerFormat, send: Send) -> None:
        """The status is sent with the first piece: an error before it has a status of its own."""
        while (piece := await generation.next_piece()) is not None:
            if not self._started:
                await self._begin(STREAM_HEADERS, send)
            for each in layout.ready(piece):
                await _send_part(await self._chunk(layout, each), send)
        await send({"type": "http.response.body", "body": b""})

    async def _chunk(self, layout: AnswerFormat, piece: AnswerPiece) -> bytes:
        if layout.chunk_size(piece) <= INLINE_ENTRIES_MAX:
            chunk = layout.chunk(piece)
        else:
            chunk = await anyio.to_thread.run_sync(layout.chunk, piece)
        return chunk if piece.usage is None else chunk + layout.last_chunks(piece.usage)

    async def _begin(self, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_error(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._started:
            await error_response(error, self._field_names)(scope, receive, send)
            return
        event = b"data: " + dump(error_object(error, self._field_names)) + b"\n\n"
        await send({"type": "http.response.body", "body": event})


async def _send_part(raw: bytes, send: Send) -> None:
    for start in range(0, len(raw), SENT_BYTES_MAX):
        part = raw[start : start + SENT_BYTES_MAX]
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
