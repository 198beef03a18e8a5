"""One event loop for all asynchronous tests of the control plane."""

from collections.abc import AsyncIterator

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps the loop open from test to test: gRPC's poller outlives a test, and what it still has
    to say to a closed loop would fail another one."""
    del anyio_backend
    yield  # noqa: PT022 - a generator is what keeps the loop open until the end
