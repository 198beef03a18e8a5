"""One end of the stream between the control plane and a frontend: messages over a socket pair.

Each message is its length (4 bytes, least first) and its bytes, in order, both ways at once. The
stream ends with the process at either end; nothing is sent twice and nothing is repaired.
"""

import asyncio
import select
import socket
import struct
from collections.abc import AsyncIterator

from control_plane.errors import ProtocolError

FRAME_BYTES_MAX = 1 << 28
"""Of one message: a request of millions of tokens, or the scores of a chunk of prompts."""
BACKLOG_BYTES_MAX = 1 << 28
"""Sent and not yet taken by the other end; beyond it the other end no longer reads."""
READ_AHEAD_BYTES = 1 << 18

_HEADER = struct.Struct("<I")


class FrameLink:
    """For one event loop. What is sent in one turn of it goes out together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @staticmethod
    async def over(end: socket.socket) -> "FrameLink":
        """A link over one end of a connected pair, which it closes."""
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=READ_AHEAD_BYTES)
        return FrameLink(reader, writer)

    @property
    def backlog_bytes(self) -> int:
        """Sent and not yet taken by the system."""
        return self._pending_bytes + self._writer.transport.get_write_buffer_size()

    @property
    def other_end_gone(self) -> bool:
        """Whether the other end is closed, be what it sent read or not."""
        if self._writer.transport.is_closing():
            return True
        hangups = select.poll()
        hangups.register(self._writer.get_extra_info("socket"), 0)  # they are told unasked
        return bool(hangups.poll(0))

    def send(self, message: bytes) -> None:
        """Sends a message; without effect once the link is closed. An end that lets the backlog
        grow beyond its bound loses the link."""
        if self._writer.transport.is_closing():
            return
        if len(message) > FRAME_BYTES_MAX or self.backlog_bytes > BACKLOG_BYTES_MAX:
            self.abort()
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending += (_HEADER.pack(len(message)), message)
        self._pending_bytes += _HEADER.size + len(message)

    async def messages(self) -> AsyncIterator[bytes]:
        """What the other end sent, until it ends or either closes. Raises ProtocolError."""
        try:
            while True:
                (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if size > FRAME_BYTES_MAX:
                    raise ProtocolError(f"a message of {size} bytes; at most {FRAME_BYTES_MAX}")
                yield await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return

    def abort(self) -> None:
        """Closes at once; what is not yet sent is lost."""
        self._pending.clear()
        self._pending_bytes = 0
        self._writer.transport.abort()

    async def close(self) -> None:
        """Closes once the other end has taken everything, or is gone."""
        self._flush()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        self._pending_bytes = 0
        if pending and not self._writer.transport.is_closing():
            self._writer.write(b"".join(pending))
