"""Hands verdicts on frozen workers to every launcher that watches."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from control_plane.scheduling.messages import Condemn

WAITING_MAX = 256


class VerdictHub:
    """Each watcher has a queue of `WAITING_MAX`; one that does not read loses the oldest."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Condemn | None]] = set()
        self._closed = False

    def publish(self, condemn: Condemn) -> None:
        """Tells every present watcher."""
        self._put(condemn)

    def close(self) -> None:
        """Ends every watch, now and later."""
        self._closed = True
        self._put(None)

    @contextmanager
    def watching(self) -> Iterator[AsyncIterator[Condemn]]:
        """Verdicts from now on, until the hub is closed."""
        queue: asyncio.Queue[Condemn | None] = asyncio.Queue(WAITING_MAX)
        self._queues.add(queue)
        try:
            yield self._read(queue)
        finally:
            self._queues.discard(queue)

    async def _read(self, queue: asyncio.Queue[Condemn | None]) -> AsyncIterator[Condemn]:
        while not self._closed and (verdict := await queue.get()) is not None:
            yield verdict

    def _put(self, item: Condemn | None) -> None:
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(item)
