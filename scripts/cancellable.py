"""Coroutines that Ctrl-C cancels as a whole."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


def run_cancellable(coroutine: Coroutine[None, None, Result]) -> Result:
    """asyncio.run, for the main thread. Raises CancelledError at Ctrl-C.

    With Python 3.10 KeyboardInterrupt would rise in whichever task runs at the moment.
    """
    return asyncio.run(_until_interrupted(coroutine))


async def _until_interrupted(coroutine: Coroutine[None, None, Result]) -> Result:
    running = asyncio.ensure_future(coroutine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
    return await running
