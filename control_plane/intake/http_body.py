"""Reads bodies of HTTP requests within limits: of one body, of all together, and of time.

A refused body is read on and dropped, since most clients read an answer only after writing.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack

import anyio
from starlette.requests import Request
from starlette.responses import Response

from control_plane.config import ControlPlaneConfig
from control_plane.errors import QueueFull

DISCARDED_BODIES = 16
"""A refused body is dropped up to so many times the limit; then the connection is."""
RETRY_AFTER_S = 1.0


class BodyTooLarge(Exception):
    """The body exceeds `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"more than {bytes_max} bytes")
        self.bytes_max = bytes_max


class BodyStalled(Exception):
    """The client stopped in the middle of the body, for `stall_s`."""

    def __init__(self, stall_s: float) -> None:
        super().__init__(f"nothing for {stall_s:g} s")
        self.stall_s = stall_s


class HeldBody:
    """A body that counts among the bytes all may hold, until it is parsed: leaving the context
    gives them back. raw: empty after that."""

    def __init__(self, reader: "BodyReader") -> None:
        self.raw = b""
        self._reader = reader
        self._bytes_count = 0

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.bytes_held -= self._bytes_count
        self._bytes_count = 0
        self.raw = b""

    def hold(self, bytes_count: int) -> None:
        """Raises QueueFull if all bodies together would hold too much."""
        self._reader.check_room(bytes_count)
        self._reader.bytes_held += bytes_count
        self._bytes_count += bytes_count


class BodyReader:
    """For the event loop's thread. bytes_held: of all bodies that are being read or parsed."""

    def __init__(self, config: ControlPlaneConfig) -> None:
        self._all_bytes_max = config.intake_bytes_max
        # A body that could never be held is too large, whatever the limit of one says.
        self._bytes_max = min(config.http_body_bytes_max, config.intake_bytes_max)
        self._stall_s = config.stream_buffer_stall_s
        self.bytes_held = 0

    def check_room(self, bytes_count: int) -> None:
        """Raises QueueFull if so many bytes more are too many."""
        if self.bytes_held + bytes_count > self._all_bytes_max:
            raise QueueFull(
                f"body: requests of {self.bytes_held} bytes are being read, and with this one they "
                f"would exceed {self._all_bytes_max}; try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    async def read(self, request: Request) -> HeldBody:
        """The whole body. Raises BodyTooLarge, BodyStalled, QueueFull, ClientDisconnect."""
        try:
            self._check_announced(request)
        except (BodyTooLarge, QueueFull):
            await self.drop(request)
            raise
        stream = aiter(request.stream())
        with ExitStack() as stack:
            body = stack.enter_context(HeldBody(self))
            try:
                body.raw = await self._read(stream, body)
            except (BodyTooLarge, QueueFull):
                stack.close()
                await self._drop(stream)
                raise
            stack.pop_all()
            return body

    async def drop(self, request: Request) -> None:
        """Reads the body of a request that is refused anyway; BodyStalled, ClientDisconnect."""
        if not _asks_first(request):
            await self._drop(aiter(request.stream()))

    def _check_announced(self, request: Request) -> None:
        announced = request.headers.get("content-length", "")
        bytes_count = int(announced) if announced.isascii() and announced.isdigit() else 0
        if bytes_count > self._bytes_max:
            raise BodyTooLarge(self._bytes_max)
        # Held as it comes and not as announced: who announces much and sends nothing blocks nobody.
        self.check_room(bytes_count)

    async def _read(self, stream: AsyncIterator[bytes], body: HeldBody) -> bytes:
        parts: list[bytes] = []
        bytes_count = 0
        while (part := await self._next_part(stream)) is not None:
            bytes_count += len(part)
            if bytes_count > self._bytes_max:
                raise BodyTooLarge(self._bytes_max)
            body.hold(len(part))
            parts.append(part)
        return b"".join(parts)

    async def _drop(self, stream: AsyncIterator[bytes]) -> None:
        left = DISCARDED_BODIES * self._bytes_max
        while left > 0 and (part := await self._next_part(stream)) is not None:
            left -= len(part)

    async def _next_part(self, stream: AsyncIterator[bytes]) -> bytes | None:
        try:
            with anyio.fail_after(self._stall_s):
                return await anext(stream, None)
        except TimeoutError as error:
            raise BodyStalled(self._stall_s) from error


def parting(request: Request, response: Response) -> Response:
    """The response to a request that is refused, maybe before its body was read."""
    if _asks_first(request):
        response.headers["connection"] = "close"
    return response


def _asks_first(request: Request) -> bool:
    """The client sends its body when it is told to go on. A refusal comes before that, and since
    the client may send it all the same, the connection must be closed after it."""
    return request.headers.get("expect", "").lower() == "100-continue"
