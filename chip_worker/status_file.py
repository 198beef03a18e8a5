"""The worker's health, as a small file: a worker has no open port that could be asked."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

FRESH_S = 15.0
"""Longer than the longest pause between two attempts to reach the control plane."""

CONNECTING = "connecting"
IDLE = "idle"
FORMING = "forming"
SERVING = "serving"
LEAVING = "leaving"
FAILED = "failed"


class StatusFile:
    """Writes {worker_id, pid, incarnation, state, group, epoch, updated}, whole or not at all.

    path: None writes nothing. wall_clock: seconds since 1970, because another process reads them.
    """

    def __init__(
        self, path: str | None, worker_id: str, incarnation: int, wall_clock: Callable[[], float]
    ) -> None:
        self._path = Path(path) if path is not None else None
        self._wall_clock = wall_clock
        self._fixed = {"worker_id": worker_id, "pid": os.getpid(), "incarnation": incarnation}

    def write(self, state: str, group: str = "", epoch: int = 0) -> None:
        """Replaces the file, or what a symbolic link leads to.

        Raises OSError if that is impossible, or there is something that is no regular file.
        """
        if self._path is None:
            return
        record = {
            **self._fixed,
            "state": state,
            "group": group,
            "epoch": epoch,
            "updated": self._wall_clock(),
        }
        if self._path.exists() and not self._path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file", str(self._path))
        target = Path(os.path.realpath(self._path))
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
        unfinished.write_text(json.dumps(record))
        unfinished.replace(target)


def check_status_file(path: str, now: float) -> tuple[bool, str]:
    """(healthy, why) as of `now`, seconds since 1970."""
    try:
        record = json.loads(Path(path).read_text())
        state, age_s = record["state"], now - record["updated"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return False, f"no status in {path}: {error}"
    if age_s > FRESH_S:
        return False, f"{state}, but silent for {age_s:.0f} s (at most {FRESH_S:.0f} s)"
    return state != FAILED, f"{state} {record.get('group', '')}".strip()
