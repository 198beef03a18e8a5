"""A worker without a chip: tells the control plane why, so that its group need not wait for it.

opening the chip --fails, or does not come back--> announce: Hello with the reason, Goodbye
"""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable

import anyio
import structlog

from chip_worker.config import WorkerConfig
from chip_worker.errors import Unreachable
from chip_worker.exit_code import ExitCode
from chip_worker.inbox import Inbox
from chip_worker.plane_address import dialled_address
from chip_worker.plane_stream import PlaneStream, Refused
from chip_worker.wire import Identity

ANNOUNCE_DEADLINE_S = 10.0
"""A control plane that listens and has not answered by then will learn it from the next process."""
ANNOUNCE_PAUSE_S = 0.5
LISTENING_DEADLINE_S = 600.0
"""A control plane that has announced no address by then is taken for one that never will."""

UNAVAILABLE = "worker.unavailable"
UNAVAILABLE_UNTOLD = "worker.unavailable_untold"
ACQUIRE_HUNG = "worker.acquire_hung"

_log = structlog.get_logger()


def identity_without_chip(config: WorkerConfig, incarnation: int, reason: str) -> Identity:
    """What this process says of itself when its chip cannot be used for this reason."""
    index = config.chip_indices[0]
    return Identity(
        worker_id=config.worker_id,
        incarnation=incarnation,
        pid=os.getpid(),
        backend=config.backend,
        chip_index=index,
        chip_description="",
        memory_bytes=0,
        dtype="",
        batch_invariant=False,
        block_tokens_multiple=1,
        model_name="",
        architecture="",
        model_digest="",
        context_tokens=0,
        vocabulary_size=0,
        device_id=config.devices[index] if config.devices else "",
        unavailable_reason=reason,
    )


def announce(config: WorkerConfig, identity: Identity) -> None:
    """Tells the reason in `identity`; returns when it is acknowledged, or after a while anyway.

    The while begins when the control plane's address is known, which may take a longer one. For a
    thread without an event loop.
    """
    _log.error(UNAVAILABLE, worker=config.worker_id, reason=identity.unavailable_reason)
    asyncio.run(_announce(config, identity))


async def _announce(config: WorkerConfig, identity: Identity) -> None:
    await _wait_announced(config)
    with anyio.move_on_after(ANNOUNCE_DEADLINE_S):
        while True:
            try:
                await _tell(config, identity)
            except Unreachable as error:
                problem = str(error)
            except Refused as error:
                _log.error(UNAVAILABLE_UNTOLD, error=str(error))
                return
            else:
                return
            _log.info(UNAVAILABLE_UNTOLD, error=problem)
            await anyio.sleep(ANNOUNCE_PAUSE_S)
    _log.error(UNAVAILABLE_UNTOLD, control_plane=config.control_plane)


async def _wait_announced(config: WorkerConfig) -> None:
    """Until the address is known, or it has taken too long.

    A control plane that is being started may take longer to listen than one that runs to answer.
    """
    pause_s = ANNOUNCE_PAUSE_S
    with anyio.move_on_after(LISTENING_DEADLINE_S):
        while True:
            try:
                await dialled_address(config.control_plane)
            except Unreachable as error:
                _log.warning(UNAVAILABLE_UNTOLD, error=str(error))
            else:
                return
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, config.connect_backoff_max_s)


async def _tell(config: WorkerConfig, identity: Identity) -> None:
    address = await dialled_address(config.control_plane)
    stream = PlaneStream(config, address, identity, Inbox(lambda _ended: None))
    try:
        await stream.attach(term_highest=0)
        stream.outbox.put_goodbye(f"its chip is unavailable: {identity.unavailable_reason}")
        await stream.serve(alive=lambda: None)
    finally:
        with anyio.CancelScope(shield=True):
            await stream.close()


class AcquireWatch:
    """Ends a process whose main thread does not come back from opening its chip; a context manager.

    deadline_s: from entering to leaving. on_hung: called on the watch's thread, with the reason.
    exit_process: ends the process at once, whatever its other threads do.
    """

    def __init__(
        self,
        deadline_s: float,
        on_hung: Callable[[str], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._deadline_s = deadline_s
        self._on_hung = on_hung
        self._exit_process = exit_process
        self._watched = threading.get_ident()
        self._timer = threading.Timer(deadline_s, self._give_up)
        self._timer.daemon = True

    def __enter__(self) -> "AcquireWatch":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001 - documented, no other way
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _log.critical(ACQUIRE_HUNG, deadline_s=self._deadline_s, stack=stack)
        try:
            self._on_hung(f"the chip could not be opened within {self._deadline_s:g} s")
        finally:
            self._exit_process(ExitCode.BACKEND_FAILED)
