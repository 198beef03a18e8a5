"""Errors of the backend layer, one tree.

BackendError
├── UnknownBackend          no backend of that name
├── IncompatibleBackend     another API version, or an override nobody calls
├── BackendUnavailable      the backend cannot start here
├── UnsupportedOperation    declared unsupported; a capability, not a fault
├── OutOfMemory             the chip has no room
├── DeviceError             the chip failed
│   ├── DeviceLost          every later call will fail too
│   └── DeviceHung          no answer within the deadline
└── CommunicatorError       a collective failed
    ├── PeerLost            another rank is gone
    ├── CommunicatorTimeout no answer within the deadline
    └── CommunicatorMisuse  ranks called different operations
"""


class BackendError(Exception):
    """Something a backend could not do; `retryable` says whether trying again can help."""

    retryable = False


class UnknownBackend(BackendError):
    """No built-in or registered backend bears the name."""


class IncompatibleBackend(BackendError):
    """The backend was written for another interface."""


class BackendUnavailable(BackendError):
    """The backend exists but cannot start on this machine."""


class UnsupportedOperation(BackendError):
    """The backend declares that it does not do this."""


class OutOfMemory(BackendError):
    """The chip has no room; the message says how much was asked and how much is in use."""


class DeviceError(BackendError):
    """The chip failed."""


class DeviceLost(DeviceError):
    """The chip failed for good: every later call fails too."""


class DeviceHung(DeviceError):
    """The chip did not answer within the deadline."""


class CommunicatorError(BackendError):
    """A collective failed; the communicator cannot be used any more."""

    retryable = True


class PeerLost(CommunicatorError):
    """Another rank of the communicator is gone."""


class CommunicatorTimeout(CommunicatorError):
    """Another rank did not take part within the deadline."""


class CommunicatorMisuse(CommunicatorError):
    """The ranks did not call the same operation."""

    retryable = False
