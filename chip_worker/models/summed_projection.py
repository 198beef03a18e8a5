"""A product whose inner dimension is split over the ranks: partial products, then their sum."""

from collections.abc import Iterator

import torch

from backends.interface import Communicator, Device, KernelTable, Matrix
from chip_worker.step_memory import StepMemory

CHUNK_TOKENS = 256
"""Tokens whose sum travels while the next ones are multiplied. Fewer would leave the product too
little work to hide a message behind, and a matrix unit too few rows."""


class SummedProjection:
    """Every rank multiplies its columns of the weight; all ranks get the sum.

    overlaps: collectives return before they are done, so that a product can hide one.
    """

    def __init__(
        self,
        kernels: KernelTable,
        communicator: Communicator,
        memory: StepMemory,
        *,
        overlaps: bool,
    ) -> None:
        self._linear = kernels.function("linear")
        self._communicator = communicator
        self._memory = memory
        self._overlaps = overlaps and communicator.world_size > 1

    def __call__(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], weight [H, K], this rank's K -> [T, H], valid until the next call.

        bias [H]: on one rank only, for it is summed too.
        """
        if self._overlaps and x.shape[0] >= 2 * CHUNK_TOKENS:
            return self._in_chunks(x, weight, bias)
        output: torch.Tensor = self._linear(x, weight, bias, None)
        sum_over_ranks(self._memory.device, self._communicator, output)
        return output

    def _in_chunks(
        self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        output = self._memory.buffer("linear", (x.shape[0], weight.shape[0]), x.dtype)
        sums = []
        for rows in _chunks(x.shape[0]):
            part = output[rows]
            self._memory.device.copy(self._linear(x[rows], weight, bias, None), part)
            sums.append(self._communicator.all_reduce(part))
        for work in sums:
            work.wait_stream()
        return output


def sum_over_ranks(device: Device, communicator: Communicator, tensor: torch.Tensor) -> None:
    """In place, on all ranks, in order with kernels."""
    if communicator.world_size > 1:
        device.in_order(
            lambda part: communicator.all_reduce(part).wait_stream(),
            tensor,
            native=communicator.native_all_reduce,
        )


def _chunks(tokens: int) -> Iterator[slice]:
    """Runs of CHUNK_TOKENS; the last is up to twice as long, never shorter."""
    stop = 0
    while stop < tokens:
        start, stop = stop, stop + CHUNK_TOKENS
        if tokens - stop < CHUNK_TOKENS:
            stop = tokens
        yield slice(start, stop)
