"""The machine that measures: what it is, and how busy it was meanwhile."""

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from control_plane.intake.release import VERSION
from control_plane.processors import physical_cores_count

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
TICKS = slice(1, 9)
"""user, nice, system, idle, iowait, irq, softirq, steal: the columns of a line of /proc/stat."""
IDLE, IOWAIT, STEAL = 3, 4, 7


def machine_facts(cpuinfo: Path = CPUINFO) -> dict[str, object]:
    """Processor, cores and system."""
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": physical_cores_count(),
        "processors_allowed": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def measured_here(date: str) -> dict[str, object]:
    """What the JSON of every measurement begins with. date: ISO 8601."""
    return {"date": date, "polychip": VERSION, "machine": machine_facts()}


class Load:
    """How busy machine and client were since it was made."""

    def __init__(self) -> None:
        self._wall_s = time.perf_counter()
        self._own_s = time.process_time()
        self._ticks = _ticks()

    def figures(self) -> dict[str, float | None]:
        """client_cpu_percent: of one core; the others: of all cores of this machine.

        What another virtual machine took of the cores is `steal`.
        """
        wall_s = time.perf_counter() - self._wall_s
        spent = [now - before for now, before in zip(_ticks(), self._ticks, strict=True)]
        total = sum(spent) or 1
        return {
            "client_cpu_percent": 100 * (time.process_time() - self._own_s) / wall_s,
            "machine_busy_percent": 100 * (total - spent[IDLE] - spent[IOWAIT]) / total,
            "machine_steal_percent": 100 * spent[STEAL] / total,
        }


def _ticks() -> Sequence[int]:
    with STAT.open() as lines:
        return [int(column) for column in lines.readline().split()[TICKS]]
