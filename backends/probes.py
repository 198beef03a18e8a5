"""Small pieces of work with known results: a chip serves only after it has done them right.

A chip can open and yet fail at its first product, or work alone and fail in a group.
"""

import time

import torch

from backends.communicator import Communicator
from backends.device import Device
from backends.errors import CommunicatorError, DeviceError
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
    product = kernels.dispatch(PROBE_OPERATION, on_chip, device.to_matrix(source), None, None)
    if not torch.equal(device.to_host(product).long(), rows @ rows.T):
        raise ProbeFailed(f"chip {device.chip.index} multiplies wrongly")


def probe_communicator(communicator: Communicator, device: Device, deadline_s: float) -> None:
    """Shows every rank what each one brings, and sums it; both together within the deadline.

    Raises ProbeFailed on the rank that brings wrong numbers or sums right ones wrongly, and a
    CommunicatorError on a rank that is right itself but has a wrong peer, or gets no answer.
    """
    ranks, rank = communicator.world_size, communicator.rank
    give_up = time.monotonic() + deadline_s
    on_chip = device.to_chip(torch.full((PROBE_SIZE,), rank + 1.0))
    gathered = device.allocate((ranks, PROBE_SIZE), torch.float32)
    communicator.all_gather(on_chip, gathered).wait(deadline_s)
    communicator.all_reduce(on_chip).wait(max(0.0, give_up - time.monotonic()))
    expected = torch.arange(1.0, ranks + 1.0)
    right = (device.to_host(gathered) == expected[:, None]).all(dim=1)
    wrong = [each for each in range(ranks) if not right[each]]
    if rank in wrong:
        raise ProbeFailed(f"rank {rank} of {ranks} brings wrong numbers to its group")
    if wrong:
        raise CommunicatorError(f"rank {wrong[0]} of {ranks} brings wrong numbers to the group")
    if not bool((device.to_host(on_chip) == expected.sum()).all()):
        raise ProbeFailed(f"rank {rank} of {ranks} sums wrongly in its group")
