"""The two ends of a decoder, embedding and LM head, whose rows are split over the ranks."""

import torch

from backends.interface import Communicator, Device, KernelTable, Matrix
from chip_worker.models.summed_projection import sum_over_ranks
from chip_worker.step_memory import StepMemory
from chip_worker.tensor_parallel import ShardPlan


class VocabularyEmbedding:
    """Embedding whose rows are split over the ranks: each looks up its own, the sum is all."""

    def __init__(
        self,
        kernels: KernelTable,
        communicator: Communicator,
        device: Device,
        shard: ShardPlan,
        scale: float,
    ) -> None:
        self._embedding = kernels.function("embedding")
        self._communicator = communicator
        self._device = device
        self._first_row = shard.vocabulary_rows.start
        self._scale = scale

    def __call__(self, ids: torch.Tensor, weight: Matrix) -> torch.Tensor:
        """ids [T] int64 -> [T, H]."""
        hidden: torch.Tensor = self._embedding(ids, weight, self._first_row, self._scale)
        sum_over_ranks(self._device, self._communicator, hidden)
        return hidden


class VocabularyHead:
    """LM head whose rows are split over the ranks; rank 0 puts the logits together."""

    def __init__(
        self,
        kernels: KernelTable,
        communicator: Communicator,
        memory: StepMemory,
        shard: ShardPlan,
        soft_cap: float,
    ) -> None:
        self._logits = kernels.function("logits")
        self._soft_cap = soft_cap
        self._bound = kernels.function("soft_cap") if soft_cap else None
        self._communicator = communicator
        self._memory = memory
        self._shard = shard

    def __call__(self, hidden: torch.Tensor, weight: Matrix) -> torch.Tensor | None:
        """hidden [R, H] -> logits [R, V] float32 on rank 0, valid until the next call, else None.

        Every rank must call it alike.
        """
        own: torch.Tensor = self._logits(hidden, weight)
        if self._bound is not None:
            own = self._bound(own, self._soft_cap)
        if self._shard.world_size == 1:
            return own
        if self._shard.rank != 0:
            with self._communicator.group():
                sent = self._communicator.send(own, 0)
            sent.wait_stream()
            return None
        return self._collect(own)

    def _collect(self, own: torch.Tensor) -> torch.Tensor:
        """Rank 0: its own part and those of the others, side by side."""
        rows, columns = own.shape[0], self._shard.vocabulary
        parts = [own] + [
            self._memory.buffer("logits", (rows, len(columns[rank])), own.dtype, part=rank)
            for rank in range(1, self._shard.world_size)
        ]
        with self._communicator.group():
            received = [
                self._communicator.receive(parts[rank], rank)
                for rank in range(1, self._shard.world_size)
            ]
        logits = self._memory.buffer("logits", (rows, columns[-1].stop), own.dtype)
        self._memory.device.copy(own, logits[:, : own.shape[1]])
        for work, part, place in zip(received, parts[1:], columns[1:], strict=True):
            work.wait_stream()
            self._memory.device.copy(part, logits[:, place.start : place.stop])
        return logits
