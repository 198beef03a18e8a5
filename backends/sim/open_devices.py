"""Which open chip a tensor is on: torch itself sees main memory everywhere."""

import torch

from backends.sim.device import SimDevice
from backends.simulator.memory import MemoryMisuse


class OpenDevices:
    """The open chips of one runtime."""

    def __init__(self) -> None:
        self._devices: list[SimDevice] = []

    def add(self, device: SimDevice) -> None:
        """The device was opened."""
        self._devices.append(device)

    def remove(self, device: SimDevice) -> None:
        """The device is closed."""
        self._devices.remove(device)

    def holding(self, tensor: torch.Tensor) -> SimDevice:
        """The chip a tensor is on. Raises MemoryMisuse for a tensor of the host."""
        if len(self._devices) == 1:
            # Whether it really is there, the launch checks.
            return self._devices[0]
        for device in self._devices:
            if device.simulated.owns(tensor):
                return device
        raise MemoryMisuse(
            f"a tensor of {tuple(tensor.shape)} is on no open chip; copy it to one first"
        )
