"""What all who start processes of this service share: where output goes, pauses between starts."""

STANDARD_ERROR = 2
"""What a child prints goes where we log: standard output is for answers."""
PAUSE_S_MIN = 0.5
PAUSE_S_MAX = 30.0
SERVED_A_WHILE_S = 60.0
"""After so long a run the pause begins anew."""


class RestartPause:
    """The pause before a process is started again: doubles, and forgets after a good run."""

    def __init__(self) -> None:
        self._failures_count = 0

    def next_s(self, ran_s: float) -> float:
        """Seconds to wait after a process that ran `ran_s`."""
        if ran_s >= SERVED_A_WHILE_S:
            self._failures_count = 0
        self._failures_count += 1
        return float(min(PAUSE_S_MAX, PAUSE_S_MIN * 2 ** min(self._failures_count - 1, 16)))
