"""Chip memory that nobody accounts for: seen when it grows, and the operation that takes it found.

    total - free  =  weights + KV pool + scratch  +  unaccounted
                                                     grows by a threshold
                                                       └─▶ armed: each kernel call is measured
                                                             └─▶ DriftAlarm(operation, ...)

A vendor's kernel may keep a hidden buffer for every new shape: no tensor of ours holds it, and only
the chip's free memory shows it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backends.device import MemoryInfo
from backends.kernel_table import KernelTable

UNKNOWN_OPERATION = "unknown"
"""Named by an alarm where memory grew, but not during calls of kernels."""
_SAMPLES_PER_WINDOW = 16


class MemoryGauge(Protocol):
    """What the drift needs of a device."""

    def memory_info(self) -> MemoryInfo:
        """See `Device.memory_info`."""

    def synchronize(self) -> None:
        """See `Device.synchronize`."""


@dataclass(frozen=True)
class DriftAlarm:
    """The operation whose unaccounted memory grows most: by how many bytes, over how many steps."""

    operation: str
    bytes: int
    steps: int


class MemoryDrift:
    """Observed once a step; belongs to the thread that computes.

    accounted: bytes of weights, KV pool and scratch. threshold_bytes: growth that calls for a
    closer look, which lasts `window` steps at most. Until then the chip is waited for and asked a
    few times a window; in it, around every call of a kernel. Where others share the memory free
    bytes say nothing of this process, and nothing is observed.
    """

    def __init__(
        self,
        device: MemoryGauge,
        accounted: Callable[[], int],
        threshold_bytes: int,
        window: int,
    ) -> None:
        assert threshold_bytes > 0, f"threshold_bytes is {threshold_bytes}"
        assert window > 0, f"window is {window}"
        self._device = device
        self._accounted = accounted
        self._threshold_bytes = threshold_bytes
        self._window = window
        self._observes = not device.memory_info().shared
        self._grown: Counter[str] | None = None
        """Bytes by operation, while armed."""
        self._expected_bytes = 0
        """While armed: what a leak as fast as the one suspected takes until the window ends."""
        self._restart()

    @property
    def armed(self) -> bool:
        """Whether calls of kernels are being measured."""
        return self._grown is not None

    def observe(self) -> DriftAlarm | None:
        """Called between steps; an alarm each time an operation was found, or none is to blame."""
        if not self._observes:
            return None
        self._steps += 1
        if self._grown is not None:
            return self._judge(self._grown)
        if self._steps % max(1, self._window // _SAMPLES_PER_WINDOW) == 0:
            self._look()
        return None

    def watched(self, kernels: KernelTable) -> KernelTable:
        """The same kernels, measured while armed; otherwise a call is one comparison dearer."""
        if not self._observes:
            return kernels
        return kernels.wrapped(lambda choice, found: self._watched(choice.operation, found))

    def _look(self) -> None:
        unaccounted_bytes = self._unaccounted_bytes()
        if unaccounted_bytes < self._base_bytes:
            self._restart(unaccounted_bytes)
        elif unaccounted_bytes - self._base_bytes >= self._threshold_bytes:
            share = min(1.0, self._window / self._steps)
            self._restart(unaccounted_bytes)
            self._expected_bytes = max(1, int(self._threshold_bytes * share))
            self._grown = Counter()

    def _judge(self, grown: Counter[str]) -> DriftAlarm | None:
        """One growth may be a buffer that stays; a second one of the same pace is a leak."""
        steps, unaccounted_bytes = self._steps, self._unaccounted_bytes()
        grown_bytes = unaccounted_bytes - self._base_bytes
        operation, most_bytes = max(grown.items(), key=lambda item: item[1], default=("", 0))
        alarm = None
        in_kernels_bytes = sum(kept for kept in grown.values() if kept > 0)
        if grown_bytes >= self._expected_bytes and 2 * in_kernels_bytes >= grown_bytes:
            alarm = DriftAlarm(operation, most_bytes, steps)
        elif grown_bytes >= self._threshold_bytes:
            alarm = DriftAlarm(UNKNOWN_OPERATION, grown_bytes, steps)
        elif steps < self._window:
            return None
        self._restart(unaccounted_bytes)
        return alarm

    def _restart(self, base_bytes: int | None = None) -> None:
        """Compares with what is unaccounted now, unarmed."""
        self._steps = 0
        self._grown = None
        self._base_bytes = self._unaccounted_bytes() if base_bytes is None else base_bytes

    def _unaccounted_bytes(self) -> int:
        # Work under way holds its tensors, though their owner dropped them.
        self._device.synchronize()
        info = self._device.memory_info()
        return info.total_bytes - info.free_bytes - self._accounted()

    def _watched(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401 - any operation
            if self._grown is None:
                return function(*arguments)
            return self._measure(operation, function, arguments)

        return call

    def _measure(
        self, operation: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:  # noqa: ANN401 - any operation
        before_bytes = self._unaccounted_bytes()
        result = function(*arguments)
        if self._grown is not None:
            # Its results are the caller's and end with the step.
            kept_bytes = self._unaccounted_bytes() - before_bytes - _new_bytes(result, arguments)
            self._grown[operation] += kept_bytes
        return result


def _new_bytes(result: Any, arguments: tuple[Any, ...]) -> int:  # noqa: ANN401 - any operation
    """Bytes of the tensors an operation returned in memory that is not its arguments'."""
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
    fresh = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in _tensors(result))
        if storage.data_ptr() not in given
    }
    return sum(fresh.values())


def _tensors(values: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - results of any operation
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
