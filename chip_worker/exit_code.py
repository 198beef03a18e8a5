"""Exit codes of a worker process, for launchers: which ends are worth a restart."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How the process ended; 1 is an unexpected error (traceback), 2 a bad option."""

    LEFT = 0
    """It was asked to leave; do not restart."""
    FAILED = 1
    USAGE = 2
    DEVICE_LOST = 3
    """The chip failed for good in this process; a restart may help."""
    HUNG = 4
    """The compute thread did not come back from an ended epoch; a restart may help."""
    GIVEN_UP = 5
    """The control plane gave it up: it was silent, its chip failed while its group formed, or
    another process took over its name; the log says which. A restart may help."""
    REFUSED = 6
    """The control plane does not admit it (join token, version); a restart does not help."""
    BACKEND_FAILED = 7
    """The backend or its chip could not be opened, or not in time; the log says why."""
    MODEL_FAILED = 8
    """The model cannot be read, or not be split as asked; a restart does not help."""
