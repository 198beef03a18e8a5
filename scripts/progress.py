"""What the launcher tells people of workers and groups, from one status to the next."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import anyio

from scripts.child_process import describe_exit
from scripts.client import AdminWatcher

UNAVAILABLE = "unavailable"


class Progress:
    """Tells what is new. report: takes lines for people."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._told: list[str] = []
        self._reasons: dict[str, str] = {}
        """Why the chip of a worker could last not be used."""
        self._lost_pids: dict[str, object] = {}
        """The latest process of a frontend that was lost."""
        self._looking = anyio.Lock()

    async def look(self, admin: AdminWatcher) -> None:
        """Asks for the status and tells what changed; nothing while the service does not answer."""
        # One after the other, or an older status would be told after a newer one.
        async with self._looking:
            status = await admin.status()
            if status is not None:
                self._tell(status)

    def reasons_of(self, names: Collection[str]) -> list[str]:
        """Why the chips of these workers could last not be used, for people."""
        return unavailable_lines({n: why for n, why in self._reasons.items() if n in names})

    def _tell(self, status: Mapping[str, object]) -> None:
        for frontend in _rows(status["frontends"]):
            if frontend["lost_pid"] != self._lost_pids.get(frontend["id"], 0):
                self._lost_pids[frontend["id"]] = frontend["lost_pid"]
                self._report(
                    f"{frontend['id']} (process {frontend['lost_pid']}) "
                    f"{describe_exit(frontend['lost_status'])}"
                )
        lines = progress_lines(status)
        for line in [line for line in lines if line not in self._told]:
            self._report(line)
        self._told = lines
        # A worker that is tried again and again has the same reason each time.
        reasons = unavailable_reasons(status)
        news = {name: why for name, why in reasons.items() if self._reasons.get(name) != why}
        for line in unavailable_lines(news):
            self._report(line)
        self._reasons |= reasons


def progress_lines(status: Mapping[str, object]) -> list[str]:
    """The states of the workers in one line, those of the frontends in another, and a line for each
    group that serves."""
    processes = (_rows(status["workers"]), _rows(status["frontends"]))
    lines = [", ".join(f"{each['id']} {each['state']}" for each in rows) for rows in processes]
    lines += [
        f"{group['id']} serves on {' '.join(group['ranks'])} with {group['blocks']['total']} "
        f"blocks of {group['block_tokens']} tokens (epoch {group['epoch']})"
        for group in _rows(status["groups"])
        if group["state"] == "serving"
    ]
    return [line for line in lines if line]


def unavailable_reasons(status: Mapping[str, object]) -> dict[str, str]:
    """Why the chip of a worker cannot be used, by the name of the worker."""
    workers = _rows(status["workers"])
    return {worker["id"]: worker["reason"] for worker in workers if worker["state"] == UNAVAILABLE}


def unavailable_lines(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with all the workers that have it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{', '.join(alike)} {'is' if len(alike) == 1 else 'are'} unavailable: {reason}"
        for reason, alike in names.items()
    ]


def _rows(value: object) -> list[dict[str, Any]]:
    assert isinstance(value, list)
    return value
