"""Draws the next tokens on rank 0 and tells every rank, so that all slot tables stay alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.interface import Communicator, KernelTable, Requirement
from chip_worker.batch import RowResult
from chip_worker.logit_adjustments import adjust_rows, unpacked
from chip_worker.slots import Slot, SlotTables
from chip_worker.step_memory import StepMemory
from chip_worker.token_scores import LOGPROBS_OPERATION, TokenScore, TokenScorer

ADJUST_OPERATION = "adjust_logits"
SAMPLE_OPERATION = "sample"


def sampler_requirements(rows_max: int) -> dict[str, Requirement]:
    """What drawing and scoring ask of the kernels."""
    requirement = Requirement(dtype="float32", rows=rows_max)
    return dict.fromkeys((ADJUST_OPERATION, SAMPLE_OPERATION, LOGPROBS_OPERATION), requirement)


@dataclass(frozen=True)
class Draw:
    """Tokens of the sampled rows on the host; the flags only on rank 0."""

    ids: list[int]
    finite: list[bool]


class Sampler:
    """Draws with counter-based Gumbel noise, in the sample operation.

    A row's draw depends on its logits, its slot's sampling and its tokens only.
    """

    def __init__(
        self,
        kernels: KernelTable,
        communicator: Communicator,
        memory: StepMemory,
        tables: SlotTables,
        scorer: TokenScorer,
    ) -> None:
        self._adjust = kernels.function(ADJUST_OPERATION)
        self._sample = kernels.function(SAMPLE_OPERATION)
        self._communicator = communicator
        self._memory = memory
        self._device = memory.device
        self._tables = tables
        self._scorer = scorer

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
        scores = self._score(logits, slots, draw)
        return tuple(
            RowResult(
                token_ids=(draw.ids[row],),
                logprobs=(score.logprob,) if score else (),
                tops=(score.tops,) if score and score.tops else (),
                finite=draw.finite[row],
                logits=self._logits_bytes(logits[row]) if slot.wants.logits else None,
            )
            for row, (slot, score) in enumerate(zip(slots, scores, strict=True))
        )

    def draw(self, logits: torch.Tensor | None, slots: Sequence[Slot]) -> Draw:
        """Draws without recording; arguments as for `sample`."""
        if logits is None:
            ids = self._memory.buffer(SAMPLE_OPERATION, (len(slots),), torch.int64)
            self._communicator.broadcast(ids, root=0).wait_stream()
            return Draw(self._device.to_host(ids).tolist(), [])
        ids, finite = self._sample(self._adjusted(logits, slots), *self._keys(slots))
        self._communicator.broadcast(ids, root=0).wait_stream()
        return Draw(self._device.to_host(ids).tolist(), self._device.to_host(finite).tolist())

    def _adjusted(self, logits: torch.Tensor, slots: Sequence[Slot]) -> torch.Tensor:
        """The logits to draw from: bias, penalties and suppression applied where asked for."""
        adjustments = adjust_rows(slots, logits.shape[1])
        if adjustments is None:
            return logits
        whole, real = (
            self._memory.place(ADJUST_OPERATION, torch.from_numpy(columns))
            for columns in adjustments.packed()
        )
        adjusted: torch.Tensor = self._adjust(logits, *unpacked(whole, real))
        return adjusted

    def _keys(self, slots: Sequence[Slot]) -> tuple[torch.Tensor, ...]:
        """The other arguments of the sample operation, in its order; two copies carry them all."""
        samplings = [slot.sampling for slot in slots]
        seed, choice, index, top_k = self._placed(
            torch.int64,
            [_signed(found.seed) for found in samplings],
            [found.choice for found in samplings],
            [slot.known - slot.output_start for slot in slots],
            [found.top_k for found in samplings],
        )
        temperature, top_p, min_p = self._placed(
            torch.float32,
            [found.temperature for found in samplings],
            [found.top_p for found in samplings],
            [found.min_p for found in samplings],
        )
        return temperature, seed, choice, index, top_k, top_p, min_p

    def _placed(self, dtype: torch.dtype, *columns: Sequence[float]) -> tuple[torch.Tensor, ...]:
        placed = self._memory.place(SAMPLE_OPERATION, torch.tensor(columns, dtype=dtype))
        return placed.unbind()

    def _score(
        self, logits: torch.Tensor, slots: Sequence[Slot], draw: Draw
    ) -> list[TokenScore | None]:
        """Scores of the rows that ask for any; there are none of a row that is not finite."""
        asking = [
            row
            for row, slot in enumerate(slots)
            if draw.finite[row] and (slot.wants.logprobs or slot.wants.top_tokens)
        ]
        scores: list[TokenScore | None] = [None] * len(slots)
        if not asking:
            return scores
        if len(asking) < len(slots):
            logits = self._rows_of(logits, asking)
        found = self._scorer.score(
            logits,
            [draw.ids[row] for row in asking],
            [slots[row].wants.top_tokens for row in asking],
        )
        for row, score in zip(asking, found, strict=True):
            scores[row] = score
        return scores

    def _rows_of(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        shape = (len(rows), logits.shape[1])
        gathered = self._memory.buffer(LOGPROBS_OPERATION, shape, logits.dtype)
        for place, row in enumerate(rows):
            self._device.copy(logits[row], gathered[place])
        return gathered

    def _logits_bytes(self, row: torch.Tensor) -> bytes:
        return self._device.to_host(row).numpy().astype("<f4").tobytes()


def _signed(seed: int) -> int:
    """The bits of a uint64 as the int64 that tensors have."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
