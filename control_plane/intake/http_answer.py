"""One generation over HTTP: waits for the answer and watches whether the client is still there."""

from collections.abc import Callable
from contextlib import suppress

import anyio
from starlette.types import Message, Receive, Scope, Send

from control_plane.errors import RequestError
from control_plane.intake.admission import Admission, GenerationInput
from control_plane.intake.answer import Answer, AnswerPiece
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.http_errors import error_object, error_response, json_response
from control_plane.intake.http_format import AnswerFormat
from control_plane.intake.http_json import dump
from control_plane.request import Request

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks proxies not to hold events back
]


class HttpAnswer:
    """An ASGI response. A client that leaves, or does not read for `stall_s`, ends its request."""

    def __init__(
        self,
        admission: Admission,
        book: AnswerBook,
        wanted: GenerationInput,
        make_format: Callable[[Request], AnswerFormat],
        *,
        streamed: bool,
        stall_s: float,
    ) -> None:
        self._admission = admission
        self._book = book
        self._wanted = wanted
        self._make_format = make_format
        self._streamed = streamed
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
        admitted = await self._admission.admit(self._wanted)
        with self._book.answering(admitted) as answer:
            layout = self._make_format(answer.request)
            if self._streamed:
                await self._stream(answer, layout, send)
                return
            pieces: list[AnswerPiece] = []
            while (piece := await answer.next_piece()) is not None:
                pieces.append(piece)
        await json_response(layout.whole(pieces))(scope, receive, send)

    async def _stream(self, answer: Answer, layout: AnswerFormat, send: Send) -> None:
        """The status is sent with the first piece: an error before it has a status of its own."""
        while (piece := await answer.next_piece()) is not None:
            chunk = layout.chunk(piece)
            if not self._started:
                self._started = True
                await send(
                    {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                )
                chunk = layout.first_chunk() + chunk
            if piece.finish_reason is not None:
                chunk += layout.last_chunks(piece.usage)
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _send_error(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        event = b"data: " + dump(error_object(error)) + b"\n\n"
        await send({"type": "http.response.body", "body": event})


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
