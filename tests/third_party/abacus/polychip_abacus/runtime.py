"""The abacus once torch is there: opens, allocates, copies; all else is Polychip's default."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from backends.interface import BackendRuntime, ChipDescription, Device


class AbacusDevice(Device):
    """Main memory; every call is done when it returns."""

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)


class AbacusRuntime(BackendRuntime):
    """Computes with the reference operations and talks over TCP, as every new backend does."""

    @override
    def open_device(self, chip: ChipDescription) -> Device:
        return AbacusDevice(chip)
