"""Reads bodies of HTTP requests within limits: of one body, of all together, and of time.

A refused body is read on and dropped, since most clients read an answer only after writing; but not
for long, since whoever is refused may be anybody.
"""

from collections.abc import AsyncIterator
from contextlib import ExitStack

import anyio
from starlette.requests import Request
from starlette.responses import Response

from control_plane.config import ControlPlaneConfig
from control_plane.errors import QueueFull
from control_plane.intake.byte_budget import ReadBudget

DISCARDED_BODIES = 16
"""A refused body is dropped up to so many times the limit; then the connection is."""
DROP_DEADLINE_S = 5.0
"""And for so long."""
LEFT_UNREAD = "polychip.left_unread"
"""Mark in the scope of a request whose body did not come to its end."""


class BodyTooLarge(Exception):
    """The body exceeds `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"more than {bytes_max} bytes")
        self.bytes_max = bytes_max


class BodyStalled(Exception):
    """The client stopped in the middle of the body, or was too slow; the message says for people
    which."""


class HeldBody:
    """A body that counts among the bytes all may hold, until it is parsed: leaving the context
    gives them back. raw: empty after that."""

    def __init__(self, budget: ReadBudget) -> None:
        self.raw = b""
        self._budget = budget
        self._bytes_count = 0

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.release(self._bytes_count)
        self._bytes_count = 0
        self.raw = b""

    def hold(self, bytes_count: int) -> None:
        """Raises QueueFull if all bodies together would hold too much."""
        self._budget.take(bytes_count)
        self._bytes_count += bytes_count


class BodyReader:
    """For the event loop's thread. budget: where bodies that are being read or parsed count."""

    def __init__(self, config: ControlPlaneConfig, budget: ReadBudget) -> None:
        self._budget = budget
        # A body that could never be held is too large, whatever the limit of one says.
        self._bytes_max = min(config.http_body_bytes_max, config.intake_bytes_max)
        self._stall_s = config.stream_buffer_stall_s
        self._deadline_s = config.body_deadline_s

    async def read(self, request: Request) -> HeldBody:
        """The whole body. Raises BodyTooLarge, BodyStalled, QueueFull, ClientDisconnect."""
        try:
            self._check_announced(request)
        except (BodyTooLarge, QueueFull):
            await self.drop(request)
            raise
        stream = aiter(request.stream())
        with ExitStack() as stack:
            body = stack.enter_context(HeldBody(self._budget))
            try:
                body.raw = await self._read(stream, body)
            except (BodyTooLarge, QueueFull):
                stack.close()
                await self._drop(request, stream)
                raise
            except BodyStalled:
                request.scope[LEFT_UNREAD] = True
                raise
            stack.pop_all()
            return body

    async def drop(self, request: Request) -> None:
        """Reads the body of a request that is refused anyway; ClientDisconnect."""
        if not _asks_first(request):
            await self._drop(request, aiter(request.stream()))

    def _check_announced(self, request: Request) -> None:
        announced = request.headers.get("content-length", "")
        bytes_count = int(announced) if announced.isascii() and announced.isdigit() else 0
        if bytes_count > self._bytes_max:
            raise BodyTooLarge(self._bytes_max)
        # Held as it comes and not as announced: who announces much and sends nothing blocks nobody.
        self._budget.check(bytes_count)

    async def _read(self, stream: AsyncIterator[bytes], body: HeldBody) -> bytes:
        parts: list[bytes] = []
        bytes_count = 0
        ends_at = anyio.current_time() + self._deadline_s
        while (part := await self._next_part(stream, ends_at)) is not None:
            bytes_count += len(part)
            if bytes_count > self._bytes_max:
                raise BodyTooLarge(self._bytes_max)
            body.hold(len(part))
            parts.append(part)
        return b"".join(parts)

    async def _next_part(self, stream: AsyncIterator[bytes], ends_at: float) -> bytes | None:
        left_s = ends_at - anyio.current_time()
        try:
            with anyio.fail_after(min(self._stall_s, left_s)):
                return await anext(stream, None)
        except TimeoutError as error:
            if self._stall_s < left_s:
                raise BodyStalled(f"nothing of it came for {self._stall_s:g} s") from error
            raise BodyStalled(f"it did not come within {self._deadline_s:g} s") from error

    async def _drop(self, request: Request, stream: AsyncIterator[bytes]) -> None:
        left = DISCARDED_BODIES * self._bytes_max
        request.scope[LEFT_UNREAD] = True
        with anyio.move_on_after(DROP_DEADLINE_S):
            while (part := await anext(stream, None)) is not None:
                left -= len(part)
                if left <= 0:
                    return
            del request.scope[LEFT_UNREAD]


def parting(request: Request, response: Response) -> Response:
    """The response to a request that is refused, maybe before its body was read."""
    if _asks_first(request) or LEFT_UNREAD in request.scope:
        response.headers["connection"] = "close"
    return response


def _asks_first(request: Request) -> bool:
    """The client sends its body when it is told to go on. A refusal comes before that, and since
    the client may send it all the same, the connection must be closed after it."""
    return request.headers.get("expect", "").lower() == "100-continue"
