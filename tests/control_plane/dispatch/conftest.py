"""The real worker port of a control plane whose core is the test."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.dispatch.wire import GroupSettings
from control_plane.dispatch.worker_server import WorkerServer
from control_plane.metrics import DispatchCounters
from control_plane.scheduling.messages import Event
from tests.fakes.dialling_worker import DiallingWorker

TERM = 1000
SETTINGS = GroupSettings(
    block_tokens=16,
    slots=8,
    chunk_tokens=64,
    context_tokens=None,
    kv_policy="cover",
    step_deadline_s=30.0,
)


class Plane:
    """A listening worker port, the events it posted, and the workers that dialled it."""

    def __init__(self, join_token: str | None, message_bytes_max: int) -> None:
        self.events: list[Event] = []
        self.counters = DispatchCounters()
        self.dispatcher = Dispatcher(SETTINGS, TERM, self.events.append, self.counters)
        self.server = WorkerServer(
            self.dispatcher,
            heartbeat_interval_s=0.1,
            lease_s=1.0,
            message_bytes_max=message_bytes_max,
            join_token=join_token,
            hello_timeout_s=0.3,
        )
        self.port = 0
        self.workers: list[DiallingWorker] = []

    def worker(self, worker_id: str = "chip0", incarnation: int = 11) -> DiallingWorker:
        self.workers.append(DiallingWorker(self.port, worker_id, incarnation))
        return self.workers[-1]

    async def wait_for_event(self, kind: type, timeout_s: float = 5.0) -> Event:
        """The first event of a kind, waited for."""
        with anyio.fail_after(timeout_s):
            while True:
                for event in self.events:
                    if isinstance(event, kind):
                        return event
                await anyio.sleep(0.005)

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


@asynccontextmanager
async def open_plane(
    join_token: str | None = None, message_bytes_max: int = 1 << 20
) -> AsyncIterator[Plane]:
    plane = Plane(join_token, message_bytes_max)
    plane.port = await plane.server.start("127.0.0.1", 0)
    try:
        yield plane
    finally:
        for worker in plane.workers:
            await worker.close()
        await plane.server.stop(0)


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with open_plane() as opened:
        yield opened


@pytest.fixture
def plane_with() -> Callable[..., object]:
    """`async with plane_with(join_token=...) as plane`."""
    return open_plane
