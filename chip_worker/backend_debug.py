"""Records of backend primitives in the worker's log, where `--debug-backend` asks for them.

open_runtime ──▶ with_debug ──▶ session: its runtime, and what to call on a fault
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from backends.debug import BackendCall, DebugLog, DebugRuntime
from backends.interface import BackendRuntime
from chip_worker.config import WorkerConfig

BACKEND_CALL = "backend.call"
BACKEND_LAST_CALLS = "backend.last_calls"

_log = structlog.get_logger()


@dataclass(frozen=True)
class DebuggedBackend:
    """The runtime to serve with.

    on_fault: logs the last calls, if any are kept; from any thread.
    """

    runtime: BackendRuntime
    on_fault: Callable[[], None]


def with_debug(runtime: BackendRuntime, config: WorkerConfig) -> DebuggedBackend:
    """The runtime itself, unless the settings ask for records of its calls.

    Raises BackendError if their pattern selects no primitive.
    """
    if config.debug_backend is None:
        return DebuggedBackend(runtime, _nothing)
    worker_id = config.worker_id

    def tell(call: BackendCall) -> None:
        log_call(worker_id, call)

    log = DebugLog(tell, config.debug_backend, config.debug_backend_calls)
    return DebuggedBackend(DebugRuntime(runtime, log), lambda: log_last_calls(worker_id, log))


def log_call(worker_id: str, call: BackendCall) -> None:
    """One line for one call; its fields are those of `BackendCall`, empty ones left out."""
    fields = {
        "shapes": [list(shape) for shape in call.shapes],
        "dtypes": list(call.dtypes),
        "bytes": call.bytes_count,
        "numbers": list(call.numbers),
        "stream": call.stream,
        "implementation": call.implementation,
        "reason": call.reason,
        "error": call.error,
    }
    told = {name: value for name, value in fields.items() if value}
    duration_us = round((call.duration_ns or 0) / 1e3, 1)
    _log.info(
        BACKEND_CALL,
        worker=worker_id,
        sequence=call.sequence,
        layer=call.layer,
        name=call.name,
        duration_us=duration_us,
        **told,
    )


def log_last_calls(worker_id: str, log: DebugLog) -> None:
    """The last calls before a fault, oldest first, each as one text."""
    _log.warning(BACKEND_LAST_CALLS, worker=worker_id, calls=[str(call) for call in log.dump()])


def _nothing() -> None:
    """Without records there is nothing to tell of a fault."""
