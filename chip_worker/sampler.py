"""Draws the next tokens on rank 0 and tells every rank, so that all slot tables stay alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.interface import Communicator, Device, KernelTable, Requirement
from chip_worker.batch import RowResult
from chip_worker.slots import Slot, SlotTables

SAMPLE_OPERATION = "sample"


def sample_requirement(rows_max: int) -> Requirement:
    """What the sampler asks of the sample operation."""
    return Requirement(dtype="float32", rows=rows_max)


@dataclass(frozen=True)
class Draw:
    """Tokens of the sampled rows on the host; log-probabilities and flags only on rank 0."""

    ids: list[int]
    logprobs: list[float]
    finite: list[bool]


class Sampler:
    """Greedy and temperature sampling with counter-based Gumbel noise, in the sample operation.

    A row's draw depends on its logits, temperature, seed, choice and output index only.
    """

    def __init__(
        self,
        kernels: KernelTable,
        communicator: Communicator,
        device: Device,
        tables: SlotTables,
    ) -> None:
        self._sample = kernels.function(SAMPLE_OPERATION)
        self._communicator = communicator
        self._device = device
        self._tables = tables

    def sample(self, logits: torch.Tensor | None, slots: Sequence[Slot]) -> tuple[RowResult, ...]:
        """Draws one token per slot, records it in the tables, returns results on rank 0.

        logits: [R, V] float32 on rank 0, None elsewhere; slots: of the R sampled rows, in order.
        Every rank of the group must call it.
        """
        if not slots:
            return ()
        draw = self.draw(logits, slots)
        for slot, token_id in zip(slots, draw.ids, strict=True):
            self._tables.record(slot, token_id)
        if logits is None:
            return ()
        # One slot that wants log-probabilities makes the column; the others ride along.
        with_logprobs = any(slot.wants_logprobs for slot in slots)
        return tuple(
            RowResult(
                token_ids=(draw.ids[row],),
                logprobs=(draw.logprobs[row],) if with_logprobs else (),
                finite=draw.finite[row],
                logits=self._logits_bytes(logits[row]) if slot.wants_logits else None,
            )
            for row, slot in enumerate(slots)
        )

    def draw(self, logits: torch.Tensor | None, slots: Sequence[Slot]) -> Draw:
        """Draws without recording; arguments as for `sample`."""
        if logits is None:
            ids = self._device.allocate((len(slots),), torch.int64)
            self._communicator.broadcast(ids, root=0).wait_stream()
            return Draw(self._device.to_host(ids).tolist(), [], [])
        ids, logprobs, finite = self._sample(
            logits,
            self._on_chip([slot.sampling.temperature for slot in slots], torch.float32),
            self._on_chip([_signed(slot.sampling.seed) for slot in slots], torch.int64),
            self._on_chip([slot.sampling.choice for slot in slots], torch.int64),
            self._on_chip([slot.known - slot.output_start for slot in slots], torch.int64),
        )
        self._communicator.broadcast(ids, root=0).wait_stream()
        return Draw(
            self._device.to_host(ids).tolist(),
            self._device.to_host(logprobs).tolist(),
            self._device.to_host(finite).tolist(),
        )

    def _on_chip(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return self._device.to_chip(torch.tensor(values, dtype=dtype))

    def _logits_bytes(self, row: torch.Tensor) -> bytes:
        return self._device.to_host(row).numpy().astype("<f4").tobytes()


def _signed(seed: int) -> int:
    """The bits of a uint64 as the int64 that tensors have."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
