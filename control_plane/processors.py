"""How many cores this machine has, and how many of them tokenize where nobody says."""

import os
from pathlib import Path

PROCESSORS = Path("/sys/devices/system/cpu")

THREAD_SWITCH_S = 0.0005
"""A tokenizer thread that computes gives the event loop its turn after this long."""


def physical_cores_count(processors: Path = PROCESSORS) -> int:
    """Cores of this machine, two threads of one core counted once."""
    siblings = {
        path.read_text().strip()
        for path in processors.glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    return len(siblings) or os.cpu_count() or 1


def tokenizer_threads_default(processes: int = 1) -> int:
    """Half the cores, shared by so many processes that tokenize: the other half computes."""
    return max(1, physical_cores_count() // 2 // processes)
