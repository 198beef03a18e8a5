"""Runs the model over the rows of a step: tables in, hidden states out, logits of chosen tokens."""

from collections.abc import Sequence

import numpy as np
import torch

from backends.interface import KernelTable, MemoryPool
from chip_worker.models.model import Model
from chip_worker.step_batch import StepBatch
from chip_worker.step_memory import StepMemory
from chip_worker.step_programs import StepPrograms

GATHER_OPERATION = "embedding"
"""Hidden states of some tokens are looked up as embeddings of some ids are."""


class ModelRunner:
    """The model on this rank's chip with its KV pool; sampling is a step of its own.

    vocabulary_tokens: ids from there on are nobody's; None if the tokenizer knows them all.
    captured_tokens: steps of so many tokens or fewer are captured, where the device captures any.
    """

    def __init__(
        self,
        model: Model,
        pool: MemoryPool,
        kernels: KernelTable,
        memory: StepMemory,
        vocabulary_tokens: int | None = None,
        captured_tokens: int = 0,
    ) -> None:
        self._model = model
        self._pool = pool
        self._gather = kernels.function(GATHER_OPERATION)
        self._memory = memory
        self._vocabulary_tokens = vocabulary_tokens
        self._programs = StepPrograms(model, pool, memory.device, captured_tokens)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Computes the batch and returns the hidden states [T, H] of its tokens.

        Valid until the next call. Every rank of the group must call it with the same batch.
        Raises whatever chip and communicator raise.
        """
        captured = self._programs.forward(batch)
        if captured is not None:
            return captured
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

    def end(self) -> None:
        """Drops what is captured, and with it all that refers to the pool."""
        self._programs.end()
