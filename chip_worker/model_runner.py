"""Runs the model over the rows of a step: tables in, hidden states out, logits of chosen tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backends.interface import BatchRows, KernelTable, MemoryPool
from chip_worker.models.model import Model
from chip_worker.slots import PlannedRow
from chip_worker.step_memory import StepMemory

GATHER_OPERATION = "embedding"
"""Hidden states of some tokens are looked up as embeddings of some ids are."""


@dataclass(frozen=True)
class StepBatch:
    """The tokens of a step, all rows one after the other.

    ids, positions: [T] int64 on the host. rows: of every KV group. sampled_tokens: places in T of
    the last token of every sampled row, ascending.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    rows: tuple[BatchRows, ...]
    sampled_tokens: tuple[int, ...]


def build_batch(rows: Sequence[PlannedRow]) -> StepBatch:
    """Gathers ids, positions and block tables of planned rows; `rows` is not empty."""
    query_starts = [0]
    sampled_tokens: list[int] = []
    for row in rows:
        query_starts.append(query_starts[-1] + row.stop - row.start)
        if row.sampled:
            sampled_tokens.append(query_starts[-1] - 1)
    return StepBatch(
        ids=np.concatenate([row.slot.tokens[row.start : row.stop] for row in rows]),
        positions=np.concatenate([np.arange(row.start, row.stop) for row in rows]),
        rows=_group_rows(rows, tuple(query_starts)),
        sampled_tokens=tuple(sampled_tokens),
    )


def _group_rows(rows: Sequence[PlannedRow], query_starts: tuple[int, ...]) -> tuple[BatchRows, ...]:
    """The same tokens in the block tables of one KV group after the other."""
    context_starts = tuple(row.start for row in rows)
    return tuple(
        BatchRows(
            query_starts,
            context_starts,
            block_tables=tuple(table.block_ids for table in tables),
            table_starts=tuple(table.start for table in tables),
        )
        for tables in zip(*(row.slot.tables for row in rows), strict=True)
    )


class ModelRunner:
    """The model on this rank's chip with its KV pool; sampling is a step of its own.

    vocabulary_tokens: ids from there on are nobody's; None if the tokenizer knows them all.
    """

    def __init__(
        self,
        model: Model,
        pool: MemoryPool,
        kernels: KernelTable,
        memory: StepMemory,
        vocabulary_tokens: int | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._gather = kernels.function(GATHER_OPERATION)
        self._memory = memory
        self._vocabulary_tokens = vocabulary_tokens

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Computes the batch and returns the hidden states [T, H] of its tokens.

        Every rank of the group must call it with the same batch. Raises whatever chip and
        communicator raise.
        """
        tokens = torch.from_numpy(np.stack((batch.ids, batch.positions)))
        placed = self._memory.place(GATHER_OPERATION, tokens)
        caches = [self._pool.bind(rows) for rows in batch.rows]
        return self._model.forward(placed[0], placed[1], caches)

    def logits(self, hidden: torch.Tensor, places: Sequence[int]) -> torch.Tensor | None:
        """The float32 logits [R, V] of R tokens, given by their ascending places in `hidden`.

        V: the ids that the tokenizer knows; the rows may be a view and need not be contiguous.
        Valid until the next call. None on ranks other than 0, and where `places` is empty. Every
        rank must call it alike.
        """
        if not places:
            return None
        if len(places) < hidden.shape[0]:
            # Only these rows go through the LM head, the largest matrix of small models.
            chosen = self._memory.place("logits", torch.tensor(places, dtype=torch.int64))
            hidden = self._gather(chosen, hidden, 0, 1.0)
        logits = self._model.logits(hidden)
        # Here and nowhere else: whoever draws, lists or scores sees no others.
        return None if logits is None else logits[:, : self._vocabulary_tokens]
