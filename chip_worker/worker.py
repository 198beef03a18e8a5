"""A worker put together once torch may be imported: session, connection, and the compute loop."""

import os
import secrets
import signal
import time
from collections.abc import Callable
from types import FrameType

import structlog

from backends.interface import open_runtime
from backends.plugin import Backend, BackendConfig
from chip_worker.batch import Command, Shutdown
from chip_worker.config import WorkerConfig
from chip_worker.connection import Connection
from chip_worker.exit_code import ExitCode
from chip_worker.inbox import Inbox
from chip_worker.session import Session
from chip_worker.status_file import StatusFile
from chip_worker.wire import Identity

WORKER_STARTED = "worker.started"
WORKER_LEFT = "worker.left"

_log = structlog.get_logger()


def serve(
    config: WorkerConfig,
    backend: Backend,
    backend_config: BackendConfig,
    model_name: str,
    wall_clock: Callable[[], float] = time.time,  # noqa: TID251 - the status file is read elsewhere
) -> ExitCode:
    """Serves until told to leave; the calling thread computes and must be the main one.

    Raises ModelError or BackendError if model or chip cannot be opened.
    """
    incarnation = secrets.randbelow((1 << 64) - 1) + 1
    status = StatusFile(config.status_file, config.worker_id, incarnation, wall_clock)
    connection = Connection(config, status)
    session = Session(config, backend, open_runtime(backend, backend_config), connection.report)
    try:
        identity = _identity(config, backend, session, incarnation, model_name)
        _log.info(WORKER_STARTED, worker=config.worker_id, chip=identity.chip_description)
        leave_on_signals(connection.inbox)
        connection.start(identity, session.abort)
        reason = run_commands(connection.inbox, session.handle)
        connection.close(reason)
        _log.info(WORKER_LEFT, reason=reason, exit_code=connection.exit_code.name)
    finally:
        session.close()
    return connection.exit_code


def run_commands(inbox: Inbox, handle: Callable[[Command], None]) -> str:
    """Carries out command after command; returns the reason of the Shutdown that ends it."""
    while True:
        command = inbox.take()
        handle(command)
        inbox.finish()
        if isinstance(command, Shutdown):
            return command.reason


def leave_on_signals(inbox: Inbox) -> None:
    """SIGTERM and SIGINT let the worker leave after its present step; a second one kills it."""

    def leave(number: int, _frame: FrameType | None) -> None:
        inbox.put_shutdown(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


def _identity(
    config: WorkerConfig, backend: Backend, session: Session, incarnation: int, model_name: str
) -> Identity:
    fingerprint = session.fingerprint
    return Identity(
        worker_id=config.worker_id,
        incarnation=incarnation,
        pid=os.getpid(),
        backend=config.backend,
        chip_index=session.chip.index,
        chip_description=session.chip.description,
        memory_bytes=session.chip.memory_bytes,
        dtype=session.dtype_name,
        batch_invariant=backend.capabilities.batch_invariant,
        can_abort=backend.capabilities.can_abort,
        block_tokens_multiple=backend.capabilities.block_tokens_multiple,
        model_name=model_name,
        architecture=fingerprint.architecture,
        model_digest=fingerprint.digest,
        context_tokens=fingerprint.context_tokens,
        vocabulary_size=fingerprint.vocabulary_size,
    )
