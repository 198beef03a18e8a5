"""Device contract: memory and order of work on one chip."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from backends.plugin import ChipDescription


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of memory on the chip."""

    total_bytes: int
    free_bytes: int


class Fence(ABC):
    """A point in a chip's work: "after this, what was asked before may be read"."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until the point is reached. Raises DeviceHung after `timeout_s`."""


class ReachedFence(Fence):
    """The fence of a chip that finishes each call before it returns."""

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """Returns at once."""


class CapturedProgram(ABC):
    """A recorded piece of work that can be run again on the same buffers."""

    @abstractmethod
    def replay(self) -> None:
        """Runs the recorded work; asynchronous where the chip is."""


class EagerProgram(CapturedProgram):
    """The default: calls the Python function again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    @override
    def replay(self) -> None:
        """Calls the function."""
        self._function()


class Device(ABC):
    """One open chip. Required: `allocate`, `copy`; the rest has defaults.

    Tensors a device returns belong to the caller; the device keeps no reference.
    """

    def __init__(self, chip: ChipDescription) -> None:
        self.chip = chip

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the chip, contents undefined. Raises OutOfMemory naming size and use."""

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies between host and chip or on the chip; ordered like any other work of the chip."""

    def to_chip(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the chip. Raises OutOfMemory."""
        target = self.allocate(tensor.shape, tensor.dtype)
        self.copy(tensor, target)
        return target

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy of a chip tensor; returns when the copy is readable."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.copy(tensor, target)
        self.synchronize()
        return target

    def fence(self) -> Fence:
        """A fence behind all work asked so far."""
        return ReachedFence()

    def synchronize(self) -> None:
        """Blocks the host until all work asked so far is done."""
        self.fence().wait()

    def capture(self, function: Callable[[], None]) -> CapturedProgram:
        """Records `function`, which works on fixed buffers, for replay; default: run eagerly."""
        return EagerProgram(function)

    def memory_info(self) -> MemoryInfo:
        """Total and free bytes; default: what was enumerated, nothing used."""
        return MemoryInfo(self.chip.memory_bytes, self.chip.memory_bytes)

    def close(self) -> None:  # noqa: B027 - optional
        """Gives the chip back; called once."""
