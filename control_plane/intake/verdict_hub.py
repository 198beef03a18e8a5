"""Hands verdicts on frozen workers to every launcher that watches."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from control_plane.scheduling.messages import Condemn

WAITING_MAX = 256
RECENT_MAX = 256
"""Workers whose latest verdict is told to whoever watches anew; no more than may wait."""


class RecentVerdicts:
    """The latest verdict on each of the `RECENT_MAX` workers that were condemned last.

    Whoever watches anew may have missed them, or have heard them: an incarnation is condemned once.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Condemn] = {}

    def __iter__(self) -> Iterator[Condemn]:
        """In the order in which they came."""
        return iter(tuple(self._latest.values()))

    def add(self, condemn: Condemn) -> None:
        """In the place of an earlier one on this worker, whose process is over."""
        self._latest.pop(condemn.worker_id, None)
        self._latest[condemn.worker_id] = condemn
        if len(self._latest) > RECENT_MAX:
            del self._latest[next(iter(self._latest))]


class VerdictHub:
    """Each watcher has a queue of `WAITING_MAX`; one that does not read loses the oldest."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Condemn | None]] = set()
        self._recent = RecentVerdicts()
        self._closed = False

    def publish(self, condemn: Condemn) -> None:
        """Tells every watcher: those present now, later ones as long as it is a recent one."""
        self._recent.add(condemn)
        self._put(condemn)

    def close(self) -> None:
        """Ends every watch, now and later."""
        self._closed = True
        self._put(None)

    @contextmanager
    def watching(self) -> Iterator[AsyncIterator[Condemn]]:
        """Recent verdicts, then those from now on, until the hub is closed."""
        queue: asyncio.Queue[Condemn | None] = asyncio.Queue(WAITING_MAX)
        for condemn in self._recent:
            queue.put_nowait(condemn)
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
