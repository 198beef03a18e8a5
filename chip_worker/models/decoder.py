"""The decoder that all architectures here are: what differs is in their configuration."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from typing_extensions import override

from backends.interface import SOFT_CAP, WINDOW, BoundKV, Requirement
from chip_worker.checkpoint import Checkpoint
from chip_worker.kv_groups import model_kv_groups
from chip_worker.model_config import ConfigFields, ModelConfig
from chip_worker.models.decoder_check import check_tensors, tables_are_one
from chip_worker.models.decoder_weights import HEAD, DecoderPlan, DecoderWeights
from chip_worker.models.layers import (
    MLP,
    Attention,
    LayerView,
    activation_operation,
    greatest_common_alignment,
)
from chip_worker.models.model import Model, ModelPlace
from chip_worker.models.rope import rotary_table
from chip_worker.models.summed_projection import SummedProjection
from chip_worker.models.vocabulary import VocabularyEmbedding, VocabularyHead
from chip_worker.tensor_parallel import ShardPlan
from chip_worker.weights import Pieces, ShardReader

_OPERATIONS = ("embedding", "rms_norm", "add_rms_norm", "linear", "logits", "rotary")


class DecoderModel(Model):
    """Pre-norm decoder: grouped-query attention with rotary positions, gated feed-forward layers.

    An architecture overrides `configure`, and is named in `registry`.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, place: ModelPlace) -> None:
        kernels, communicator, shard = place.kernels, place.communicator, place.shard
        self._weights = weights
        self._epsilon = config.norm_epsilon
        self._rms_norm = kernels.function("rms_norm")
        self._add_rms_norm = kernels.function("add_rms_norm")
        self._embedding = VocabularyEmbedding(
            kernels, communicator, place.memory.device, shard, config.embedding_scale
        )
        project = SummedProjection(kernels, communicator, place.memory, overlaps=place.overlaps)
        self._attention = Attention(kernels, project, shard, config)
        self._mlp = MLP(kernels, project, config.activation)
        self._head = VocabularyHead(
            kernels, communicator, place.memory, shard, config.logit_soft_cap
        )
        self._views = _layer_views(config, place)

    @override
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, caches: Sequence[BoundKV]
    ) -> torch.Tensor:
        layers = self._weights.layers
        residual = self._embedding(ids, self._weights.embedding)
        hidden: torch.Tensor = self._rms_norm(residual, layers[0].attention_norm, self._epsilon)
        for index, (layer, view) in enumerate(zip(layers, self._views, strict=True)):
            attended = self._attention(
                view, layer.attention, hidden, positions, caches[view.place.group]
            )
            hidden, residual = self._add(
                attended, layer.attention_output_norm, residual, layer.mlp_norm
            )
            # The norm of the next layer belongs to the addition before it.
            last = index + 1 == len(layers)
            norm = self._weights.final_norm if last else layers[index + 1].attention_norm
            fed = self._mlp(layer.mlp, hidden)
            hidden, residual = self._add(fed, layer.mlp_output_norm, residual, norm)
        return hidden

    @override
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._head(hidden, self._weights.head)

    def _add(
        self,
        output: torch.Tensor,
        output_norm: torch.Tensor | None,
        residual: torch.Tensor,
        next_norm: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum with the residual, normed for what comes next, and as it is."""
        if output_norm is not None:
            output = self._rms_norm(output, output_norm, self._epsilon)
        hidden, total = self._add_rms_norm(output, residual, next_norm, self._epsilon)
        return hidden, total

    @classmethod
    @override
    def describe(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = cls.configure(checkpoint.fields)
        activation_operation(config.activation)
        model_kv_groups(config)
        if config.tied_embeddings and checkpoint.has(HEAD):
            config = replace(config, tied_embeddings=tables_are_one(checkpoint))
        check_tensors(checkpoint, config)
        return config

    @staticmethod
    @abstractmethod
    def configure(fields: ConfigFields) -> ModelConfig:
        """What the fields say of this architecture. Raises ModelError naming source and field."""

    @staticmethod
    @override
    def weight_pieces(config: ModelConfig, shard: ShardPlan) -> Iterable[Pieces]:
        return DecoderPlan(config, shard).tensors()

    @staticmethod
    @override
    def load(config: ModelConfig, shard: ShardPlan, reader: ShardReader) -> DecoderWeights:
        return DecoderPlan(config, shard).load(reader)

    @staticmethod
    @override
    def requirements(
        config: ModelConfig, shard: ShardPlan, dtype: str, kv_order: str, rows_max: int
    ) -> Mapping[str, Requirement]:
        attended_size = len(shard.query_heads) * config.head_size
        alignment = greatest_common_alignment(
            (config.hidden_size, attended_size, len(shard.intermediate), config.head_size)
        )
        plain = Requirement(dtype=dtype, rows=rows_max, last_dimension=alignment)
        cached = Requirement(
            dtype=dtype, layout=kv_order, rows=rows_max, last_dimension=config.head_size
        )
        operations = [*_OPERATIONS, activation_operation(config.activation)]
        if config.logit_soft_cap:
            operations.append("soft_cap")
        found = dict.fromkeys(operations, plain)
        if config.query_key_norm:
            # Every head of a token is a row of its own.
            heads = max(len(shard.query_heads), len(shard.kv_heads))
            found["rms_norm"] = replace(plain, rows=rows_max * heads)
        features = []
        if any(config.layer_windows):
            features.append(WINDOW)
        if config.attention_soft_cap:
            features.append(SOFT_CAP)
        attention = replace(cached, features=tuple(features))
        return found | {"write_kv": cached, "attention": attention}


def _layer_views(config: ModelConfig, place: ModelPlace) -> tuple[LayerView, ...]:
    groups = model_kv_groups(config)
    table = place.keep("rotary", rotary_table(config.rope, config.head_size, place.context_tokens))
    windowed = table
    if config.window_rope is not None and any(groups.windows):
        windowed = place.keep(
            "rotary", rotary_table(config.window_rope, config.head_size, place.context_tokens)
        )
    views: list[LayerView] = []
    for kv_place in groups.places:
        window = groups.windows[kv_place.group]
        views.append(LayerView(kv_place, window, windowed if window else table))
    return tuple(views)
