"""Layers that decoder models are made of, written once over kernels and communicator.

    hidden [T, H], the same on every rank
      | attention: a rank's heads       | MLP: a rank's intermediate columns
      v                                 v
    partial [T, H]  --all_reduce-->  hidden [T, H]

Layers only view what is on the chip: kernels compute, the device copies, nothing else reads or
writes, for a tensor's contents may be there long after the call that makes them. They never see
keys and values once written: the cache is opaque.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.interface import BoundKV, Communicator, KernelTable
from chip_worker.errors import ModelError
from chip_worker.model_config import RopeConfig
from chip_worker.models.summed_projection import SummedProjection
from chip_worker.step_memory import StepMemory
from chip_worker.tensor_parallel import ShardPlan


@dataclass(frozen=True)
class AttentionWeights:
    """query_key_value [(h + 2k) * d, H], rows of the three below each other; output [H, h * d]."""

    query_key_value: torch.Tensor
    output: torch.Tensor
    query_key_value_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class MLPWeights:
    """gate_up [2I, H], gate over up; down [H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the norms are [H]."""

    attention_norm: torch.Tensor
    attention: AttentionWeights
    mlp_norm: torch.Tensor
    mlp: MLPWeights


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a rank; embedding and head are [V, H] and one tensor where they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    bytes_total: int


class Attention:
    """Grouped-query attention of this rank's heads over the paged cache."""

    def __init__(
        self, kernels: KernelTable, project: SummedProjection, shard: ShardPlan, head_size: int
    ) -> None:
        self._linear = kernels.function("linear")
        self._rotary = kernels.function("rotary")
        self._write_kv = kernels.function("write_kv")
        self._attention = kernels.function("attention")
        self._project = project
        self._query_heads = len(shard.query_heads)
        self._kv_heads = len(shard.kv_heads)
        self._q_to_kv = shard.q_to_kv
        self._head_size = head_size
        self._scale = head_size**-0.5

    def __call__(
        self,
        layer: int,
        weights: AttentionWeights,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: BoundKV,
    ) -> torch.Tensor:
        """hidden [T, H] -> [T, H], summed over the ranks; writes keys and values of `layer`."""
        tokens = hidden.shape[0]
        rotated_heads = self._query_heads + self._kv_heads
        rotated_size = rotated_heads * self._head_size
        projected = self._linear(
            hidden, weights.query_key_value, weights.query_key_value_bias, None
        )
        query_key = projected[:, :rotated_size].view(tokens, rotated_heads, self._head_size)
        value = projected[:, rotated_size:].view(tokens, self._kv_heads, self._head_size)
        query_key = self._rotary(query_key, positions, cos_sin)
        self._write_kv(cache, layer, query_key[:, self._query_heads :], value)
        attended = self._attention(
            cache, layer, query_key[:, : self._query_heads], self._q_to_kv, self._scale
        )
        assert attended.is_contiguous(), f"attention gave strides {attended.stride()}"
        return self._project(attended.view(tokens, -1), weights.output)


class MLP:
    """Gated feed-forward layer over this rank's part of the intermediate dimension."""

    def __init__(self, kernels: KernelTable, project: SummedProjection) -> None:
        self._linear = kernels.function("linear")
        self._silu_mul = kernels.function("silu_mul")
        self._project = project

    def __call__(self, weights: MLPWeights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H], summed over the ranks."""
        gated = self._silu_mul(self._linear(hidden, weights.gate_up, None, None))
        return self._project(gated, weights.down)


class VocabularyEmbedding:
    """Embedding whose rows are split over the ranks: each looks up its own, the sum is all."""

    def __init__(self, kernels: KernelTable, communicator: Communicator, shard: ShardPlan) -> None:
        self._embedding = kernels.function("embedding")
        self._communicator = communicator
        self._first_row = shard.vocabulary_rows.start

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> [T, H]."""
        hidden: torch.Tensor = self._embedding(ids, weight, self._first_row)
        self._communicator.all_reduce(hidden).wait_stream()
        return hidden


class VocabularyHead:
    """LM head whose rows are split over the ranks; rank 0 puts the logits together."""

    def __init__(
        self,
        kernels: KernelTable,
        communicator: Communicator,
        memory: StepMemory,
        shard: ShardPlan,
    ) -> None:
        self._logits = kernels.function("logits")
        self._communicator = communicator
        self._memory = memory
        self._shard = shard

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """hidden [R, H] -> logits [R, V] float32 on rank 0, valid until the next call, else None.

        Every rank must call it alike.
        """
        own: torch.Tensor = self._logits(hidden, weight)
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


def rotary_table(rope: RopeConfig, head_size: int, context_tokens: int) -> torch.Tensor:
    """Cosines and sines of every position: host float32 [context_tokens, head_size].

    Raises ModelError for a kind of rotary embedding other than "default".
    """
    if rope.kind != "default":
        raise ModelError(f"rotary embedding of kind {rope.kind!r} is not supported, only 'default'")
    if rope.rotary_size != head_size:
        raise ModelError(
            f"rotary embedding over {rope.rotary_size} of {head_size} dimensions is not supported, "
            "only over all of them"
        )
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / torch.pow(rope.base, exponents)
    angles = torch.arange(context_tokens, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def greatest_common_alignment(sizes: Sequence[int]) -> int:
    """The largest power of two that divides every size, for the alignment of a requirement."""
    combined = 0
    for size in sizes:
        combined |= size
    return combined & -combined
