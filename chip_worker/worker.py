"""A worker put together once torch may be imported: session, connection, and the compute loop.

A chip that cannot be opened, or does not come back from it, is told to the control plane first.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable
from types import FrameType

import structlog

from backends.errors import BackendError, BackendUnavailable
from backends.interface import open_runtime
from backends.plugin import Backend, BackendConfig
from chip_worker.backend_debug import with_debug
from chip_worker.batch import Command, Shutdown
from chip_worker.config import WorkerConfig
from chip_worker.connection import Connection
from chip_worker.errors import ConfigurationError
from chip_worker.exit_code import ExitCode
from chip_worker.inbox import Inbox
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from chip_worker.status_file import FAILED, StatusFile
from chip_worker.unavailable import AcquireWatch, announce, identity_without_chip
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

    Raises ModelError; BackendError if the chip cannot be opened, ConfigurationError if it cannot do
    as it is told: the control plane knows of both by then. A chip that does not come back in time
    ends the process.
    """
    incarnation = secrets.randbelow((1 << 64) - 1) + 1
    status = StatusFile(config.status_file, config.worker_id, incarnation, wall_clock)
    connection = Connection(config, status)
    session = _open_session(config, backend, backend_config, connection, status, incarnation)
    try:
        identity = _identity(config, backend, session, incarnation, model_name)
        _log.info(WORKER_STARTED, worker=config.worker_id, chip=identity.chip_description)
        leave_on_signals(connection.inbox)
        connection.start(identity, session.abort, lambda: session.is_probing)
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


def _open_session(
    config: WorkerConfig,
    backend: Backend,
    backend_config: BackendConfig,
    connection: Connection,
    status: StatusFile,
    incarnation: int,
) -> Session:
    """Opens checkpoint and chip.

    Raises ModelError; or, after telling of it, BackendError or ConfigurationError.
    """

    def tell(reason: str) -> None:
        connection.on_fault()
        status.write(FAILED)
        announce(config, identity_without_chip(config, incarnation, reason))

    # First, and unwatched: what is wrong or slow with a checkpoint is not the chip's doing.
    loader = ShardLoader(config.model_path, config.weights)
    try:
        with AcquireWatch(config.acquire_deadline_s, tell):
            # A vendor's libraries are imported here: that may fail or hang like the chip itself.
            debugged = with_debug(open_runtime(backend, backend_config), config)
            connection.on_fault = debugged.on_fault
            return Session(
                config,
                backend,
                debugged.runtime,
                loader,
                connection.report,
                on_fault=debugged.on_fault,
            )
    except (BackendError, ConfigurationError) as error:
        tell(str(error))
        raise
    except Exception as error:
        # Whatever a vendor's library raises.
        reason = f"{type(error).__name__}: {error}"
        tell(reason)
        raise BackendUnavailable(f"the chip could not be opened: {reason}") from error


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
        block_tokens_multiple=backend.capabilities.block_tokens_multiple,
        model_name=model_name,
        architecture=fingerprint.architecture,
        model_digest=fingerprint.digest,
        context_tokens=fingerprint.context_tokens,
        vocabulary_size=fingerprint.vocabulary_size,
        kv_windows=session.kv_windows,
        rows_max=backend.capabilities.rows_max,
        device_id=session.chip.device_id,
    )
