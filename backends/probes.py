"""Small pieces of work with known results: a chip serves only after it has done them right.

A chip can open and yet fail at its first product, or work alone and fail in a group.
"""

import torch

from backends.communicator import Communicator
from backends.device import Device
from backends.errors import DeviceError
from backends.kernel_table import KernelTable
from kernels.spec import Requirement

PROBE_SIZE = 64
PROBE_OPERATION = "linear"


class ProbeFailed(DeviceError):
    """A chip opened but computes or communicates wrongly."""


def probe_requirements(dtype: torch.dtype) -> dict[str, Requirement]:
    """The operations `probe_device` asks for."""
    name = str(dtype).removeprefix("torch.")
    return {PROBE_OPERATION: Requirement(dtype=name, rows=PROBE_SIZE, last_dimension=PROBE_SIZE)}


def probe_device(device: Device, kernels: KernelTable, dtype: torch.dtype) -> None:
    """Allocates, copies there and back, and multiplies. Raises ProbeFailed or another BackendError.

    The factors are small whole numbers: their products are exact in every dtype.
    """
    rows = torch.arange(PROBE_SIZE * PROBE_SIZE).view(PROBE_SIZE, PROBE_SIZE) % 5 - 2
    source = rows.to(dtype)
    on_chip = device.to_chip(source)
    if not torch.equal(device.to_host(on_chip), source):
        raise ProbeFailed(f"chip {device.chip.index} does not give back what was copied to it")
    product = kernels.dispatch(PROBE_OPERATION, on_chip, on_chip, None, None)
    if not torch.equal(device.to_host(product).long(), rows @ rows.T):
        raise ProbeFailed(f"chip {device.chip.index} multiplies wrongly")


def probe_communicator(communicator: Communicator, device: Device, deadline_s: float) -> None:
    """Sums what every rank brings. Raises ProbeFailed or a CommunicatorError after the deadline."""
    ranks = communicator.world_size
    own = torch.full((PROBE_SIZE,), float(communicator.rank + 1))
    on_chip = device.to_chip(own)
    communicator.all_reduce(on_chip).wait(deadline_s)
    expected = ranks * (ranks + 1) / 2
    if not bool((device.to_host(on_chip) == expected).all()):
        raise ProbeFailed(f"rank {communicator.rank} of {ranks} sums wrongly in its group")
