"""Watches that a chip's memory holds what this rank put there, and says whose memory grows."""

import structlog

from backends.drift import MemoryDrift
from backends.interface import Device, KernelTable, MemoryPool

GROWTH_BYTES = 4 << 20
"""Growth that is looked into: far below what matters to a pool, far above what one buffer takes."""
WINDOW_STEPS = 256
"""The closer look waits for the chip at every kernel; it ends after so many steps."""

_log = structlog.get_logger(__name__)


class MemoryWatch:
    """Observes once a step; a warning in the log is the alarm, one for each operation."""

    def __init__(self, device: Device, pool: MemoryPool, weight_bytes: int) -> None:
        self._logged: set[str] = set()
        self._drift = MemoryDrift(
            device,
            lambda: weight_bytes + pool.held_bytes + device.scratch.bytes_held,
            GROWTH_BYTES,
            WINDOW_STEPS,
        )

    def watched(self, kernels: KernelTable) -> KernelTable:
        """The kernels to compute with, so that each can be looked at."""
        return self._drift.watched(kernels)

    def observe(self) -> None:
        """Called between steps, once what the last one took is reclaimed and dropped."""
        alarm = self._drift.observe()
        if alarm is None or alarm.operation in self._logged:
            return
        self._logged.add(alarm.operation)
        _log.warning(
            "memory.drift", operation=alarm.operation, bytes=alarm.bytes, steps=alarm.steps
        )
