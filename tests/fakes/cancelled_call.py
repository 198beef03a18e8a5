"""An Attach call that turns being cancelled into a cancellation of its own, as gRPC's may."""

import asyncio
import threading
from contextlib import suppress

from protos import worker_pb2


class CancelledCall:
    """Never answered. patience_s: it is cancelled by itself after so long, by nobody's wish."""

    def __init__(self, patience_s: float | None = None) -> None:
        self.read_begun = threading.Event()
        self._patience_s = patience_s

    def Attach(self) -> "CancelledCall":  # noqa: N802 - it is its own stub
        return self

    async def write(self, _message: worker_pb2.AttachRequest) -> None:
        pass

    async def read(self) -> object:
        self.read_begun.set()
        with suppress(asyncio.CancelledError, asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), self._patience_s)
        raise asyncio.CancelledError

    def cancel(self) -> None:
        pass
