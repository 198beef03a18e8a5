"""What a model architecture provides: one file per architecture, registered in `registry`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from backends.interface import BoundKV, Communicator, KernelTable, Lifetime, Requirement
from chip_worker.checkpoint import Checkpoint
from chip_worker.model_config import ModelConfig
from chip_worker.models.decoder_weights import DecoderWeights
from chip_worker.step_memory import StepMemory
from chip_worker.tensor_parallel import ShardPlan
from chip_worker.weights import Pieces, ShardReader


@dataclass(frozen=True)
class ModelPlace:
    """Where a model runs for one epoch: the chip's memory and kernels, and its group.

    context_tokens: positions it must know. overlaps: collectives return before they are done.
    """

    memory: StepMemory
    kernels: KernelTable
    communicator: Communicator
    shard: ShardPlan
    context_tokens: int
    overlaps: bool = False

    def keep(self, operation: str, values: torch.Tensor) -> torch.Tensor:
        """A copy on the chip, until the epoch ends, of host values that `operation` reads."""
        device = self.memory.device
        kept = device.scratch.take(Lifetime.MODEL, operation, values.shape, values.dtype)
        device.copy(values, kept)
        return kept


class Model(ABC):
    """A model bound to one rank for one epoch; weights are kept by the caller between epochs."""

    @classmethod
    @abstractmethod
    def describe(cls, checkpoint: Checkpoint) -> ModelConfig:
        """What the checkpoint holds, checked against it tensor by tensor; loads no weights.

        Raises ModelError naming what is missing, does not fit or cannot be computed.
        """

    @staticmethod
    @abstractmethod
    def weight_pieces(config: ModelConfig, shard: ShardPlan) -> Iterable[Pieces]:
        """Of every matrix and vector that `load` will put on the chip."""

    @staticmethod
    @abstractmethod
    def load(config: ModelConfig, shard: ShardPlan, reader: ShardReader) -> DecoderWeights:
        """Reads the shard. Raises ModelError or OutOfMemory."""

    @staticmethod
    @abstractmethod
    def requirements(
        config: ModelConfig, shard: ShardPlan, dtype: str, kv_order: str, rows_max: int
    ) -> Mapping[str, Requirement]:
        """The operations the model calls, for `bind_kernels`."""

    @abstractmethod
    def __init__(self, config: ModelConfig, weights: DecoderWeights, place: ModelPlace) -> None:
        """Binds weights to a place."""

    @abstractmethod
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, caches: Sequence[BoundKV]
    ) -> torch.Tensor:
        """ids and positions [T] int64 on the chip -> hidden states after the last norm [T, H].

        caches: of every KV group, as `chip_worker.kv_groups` orders them. Writes the tokens' keys
        and values. The same result on every rank.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [R, H] -> [R, V] float32 on rank 0, None on the other ranks.

        Valid until the next call.
        """
