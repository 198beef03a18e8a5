"""Where every error of a worker becomes a kind of Fault, the most specific first."""

from backends.errors import (
    CommunicatorError,
    DeviceError,
    DeviceHung,
    DeviceLost,
    OutOfMemory,
    UnsupportedOperation,
)
from chip_worker.batch import FaultKind
from chip_worker.errors import DivergedError, ModelError

_KINDS: tuple[tuple[type[Exception], FaultKind], ...] = (
    (OutOfMemory, FaultKind.OUT_OF_MEMORY),
    (MemoryError, FaultKind.OUT_OF_MEMORY),
    (DeviceError, FaultKind.DEVICE),
    (CommunicatorError, FaultKind.PEER),
    (DivergedError, FaultKind.DIVERGED),
    (ModelError, FaultKind.MODEL),
    # A kernel the chip does not have will not be there next time either.
    (UnsupportedOperation, FaultKind.MODEL),
)


def fault_kind(error: Exception) -> FaultKind:
    """What an error means to the control plane."""
    for error_class, kind in _KINDS:
        if isinstance(error, error_class):
            return kind
    return FaultKind.INTERNAL


def is_fatal(error: Exception) -> bool:
    """True if the process cannot serve again and must exit.

    A hang is noticed when the peers have long given up the epoch; only what ends the process still
    counts then, and else nobody would be blamed.
    """
    return isinstance(error, (DeviceLost, DeviceHung)) or fault_kind(error) is FaultKind.MODEL
