"""What the operating system says about this machine: memory, and what the cores compute in."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backends.plugin import ChipDescription

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True)
class CpuChip(ChipDescription):
    """A set of cores that computes as one chip."""

    cores: tuple[int, ...] = ()


class HostMemory(NamedTuple):
    """Bytes of main memory: all, and what programs can have without swapping."""

    total: int
    available: int


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), control_group: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """The machine's memory, or the control group's where a container has less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    limit, used = control_group / "memory.max", control_group / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
        available = max(0, min(available, int(text) - int(used.read_text())))
    return HostMemory(total, available)


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the cores multiply bfloat16 in hardware."""
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return not _BFLOAT16_FLAGS.isdisjoint(line.split())
    return False
