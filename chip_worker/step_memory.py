"""Temporary chip memory of the step under way: what is placed or assembled, all gone at its end."""

import math
from collections.abc import Sequence

import torch

from backends.interface import Device, Lifetime


class StepMemory:
    """Step scratch of one epoch; `end` ends all tensors it gave out. One per formation."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype, int], torch.Tensor] = {}

    def place(self, operation: str, values: torch.Tensor) -> torch.Tensor:
        """A copy on the chip of host values that `operation` reads. Raises OutOfMemory."""
        scratch = self.device.scratch
        placed = scratch.take(Lifetime.STEP, operation, values.shape, values.dtype)
        self.device.copy(values, placed)
        return placed

    def buffer(
        self, operation: str, shape: Sequence[int], dtype: torch.dtype, part: int = 0
    ) -> torch.Tensor:
        """A contiguous tensor of undefined contents; valid until the next one of the same part.

        Layers and slices of a step that come one after the other share one place, so that a step
        needs the memory of the largest and not of all. Raises OutOfMemory.
        """
        count = math.prod(shape)
        key = (operation, dtype, part)
        found = self._buffers.get(key)
        if found is None or found.numel() < count:
            found = self.device.scratch.take(Lifetime.STEP, operation, (count,), dtype)
            self._buffers[key] = found
        return found[:count].view(tuple(shape))

    def end(self) -> None:
        """The step is over, done or failed."""
        self._buffers.clear()
        self.device.scratch.reclaim(Lifetime.STEP)
