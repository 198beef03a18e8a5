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

from backends.interface import BoundKV, KernelTable
from chip_worker.errors import ModelError
from chip_worker.kv_groups import KVPlace
from chip_worker.model_config import ModelConfig
from chip_worker.models.decoder_weights import AttentionWeights, MLPWeights
from chip_worker.models.summed_projection import SummedProjection
from chip_worker.tensor_parallel import ShardPlan

ACTIVATIONS = {
    "silu": "silu_mul",
    "swish": "silu_mul",
    "gelu_pytorch_tanh": "gelu_mul",
    "gelu_new": "gelu_mul",
}
"""The operation of each activation, by the names of config.json."""


@dataclass(frozen=True)
class LayerView:
    """What a layer sees: where its keys and values are, how many tokens (0 for all), rotated how.

    cos_sin: [P, d], a table of `rotary_table` on the chip.
    """

    place: KVPlace
    window: int
    cos_sin: torch.Tensor


class Attention:
    """Grouped-query attention of this rank's heads over the paged cache."""

    def __init__(
        self, kernels: KernelTable, project: SummedProjection, shard: ShardPlan, config: ModelConfig
    ) -> None:
        self._linear = kernels.function("linear")
        self._rms_norm = kernels.function("rms_norm")
        self._rotary = kernels.function("rotary")
        self._write_kv = kernels.function("write_kv")
        self._attention = kernels.function("attention")
        self._project = project
        self._query_heads = len(shard.query_heads)
        self._kv_heads = len(shard.kv_heads)
        self._q_to_kv = shard.q_to_kv
        self._head_size = config.head_size
        self._epsilon = config.norm_epsilon
        self._scale = config.score_scale
        self._soft_cap = config.attention_soft_cap

    def __call__(
        self,
        view: LayerView,
        weights: AttentionWeights,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: BoundKV,
    ) -> torch.Tensor:
        """hidden [T, H] -> [T, H], summed over the ranks; writes the layer's keys and values."""
        tokens = hidden.shape[0]
        rotated_heads = self._query_heads + self._kv_heads
        rotated_size = rotated_heads * self._head_size
        projected = self._linear(
            hidden, weights.query_key_value, weights.query_key_value_bias, None
        )
        query_key = projected[:, :rotated_size].view(tokens, rotated_heads, self._head_size)
        value = projected[:, rotated_size:].view(tokens, self._kv_heads, self._head_size)
        query, key = self._rotated(weights, query_key, positions, view.cos_sin)
        layer = view.place.layer
        self._write_kv(cache, layer, key, value)
        attended = self._attention(
            cache, layer, query, self._q_to_kv, self._scale, view.window, self._soft_cap
        )
        assert attended.is_contiguous(), f"attention gave strides {attended.stride()}"
        return self._project(attended.view(tokens, -1), weights.output, weights.output_bias)

    def _rotated(
        self,
        weights: AttentionWeights,
        query_key: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query_key [T, h + k, d] -> query [T, h, d] and key [T, k, d], normed where they are."""
        if weights.query_norm is None:
            both = self._rotary(query_key, positions, cos_sin)
            return both[:, : self._query_heads], both[:, self._query_heads :]
        query = self._rms_norm(query_key[:, : self._query_heads], weights.query_norm, self._epsilon)
        key = self._rms_norm(query_key[:, self._query_heads :], weights.key_norm, self._epsilon)
        return self._rotary(query, positions, cos_sin), self._rotary(key, positions, cos_sin)


class MLP:
    """Gated feed-forward layer over this rank's part of the intermediate dimension."""

    def __init__(self, kernels: KernelTable, project: SummedProjection, activation: str) -> None:
        self._linear = kernels.function("linear")
        self._activate = kernels.function(activation_operation(activation))
        self._project = project

    def __call__(self, weights: MLPWeights, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, H] -> [T, H], summed over the ranks."""
        gated = self._activate(self._linear(hidden, weights.gate_up, weights.gate_up_bias, None))
        return self._project(gated, weights.down, weights.down_bias)


def activation_operation(activation: str) -> str:
    """The operation that computes it. Raises ModelError naming those there are."""
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"activation {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[activation]


def greatest_common_alignment(sizes: Sequence[int]) -> int:
    """The largest power of two that divides every size, for the alignment of a requirement."""
    combined = 0
    for size in sizes:
        combined |= size
    return combined & -combined
