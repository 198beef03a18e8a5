"""The Llama architecture (Llama 1 to 3, SmolLM, and others that say so), tensor parallel."""

from collections.abc import Mapping

import torch
from typing_extensions import override

from backends.interface import BoundKV, Requirement
from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig
from chip_worker.models.layers import (
    MLP,
    Attention,
    AttentionWeights,
    DecoderWeights,
    LayerWeights,
    MLPWeights,
    VocabularyEmbedding,
    VocabularyHead,
    greatest_common_alignment,
    rotary_table,
)
from chip_worker.models.model import Model, ModelPlace
from chip_worker.models.summed_projection import SummedProjection
from chip_worker.tensor_parallel import ShardPlan
from chip_worker.weights import RowPart, ShardReader

_OPERATIONS = ("embedding", "rms_norm", "add_rms_norm", "linear", "logits", "rotary", "silu_mul")
_CACHE_OPERATIONS = ("write_kv", "attention")


class LlamaModel(Model):
    """Pre-norm decoder: grouped-query attention with rotary positions, gated SiLU feed-forward."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, place: ModelPlace) -> None:
        kernels, communicator, shard = place.kernels, place.communicator, place.shard
        self._weights = weights
        self._epsilon = config.norm_epsilon
        self._rms_norm = kernels.function("rms_norm")
        self._add_rms_norm = kernels.function("add_rms_norm")
        self._embedding = VocabularyEmbedding(kernels, communicator, shard)
        project = SummedProjection(kernels, communicator, place.memory, overlaps=place.overlaps)
        self._attention = Attention(kernels, project, shard, config.head_size)
        self._mlp = MLP(kernels, project)
        self._head = VocabularyHead(kernels, communicator, place.memory, shard)
        self._cos_sin = place.keep(
            "rotary", rotary_table(config.rope, config.head_size, place.context_tokens)
        )

    @override
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: BoundKV) -> torch.Tensor:
        layers = self._weights.layers
        hidden: torch.Tensor
        residual = self._embedding(ids, self._weights.embedding)
        hidden = self._rms_norm(residual, layers[0].attention_norm, self._epsilon)
        for index, layer in enumerate(layers):
            attended = self._attention(
                index, layer.attention, hidden, positions, self._cos_sin, cache
            )
            hidden, residual = self._add_rms_norm(attended, residual, layer.mlp_norm, self._epsilon)
            # The norm of the next layer belongs to the addition before it.
            last = index + 1 == len(layers)
            norm = self._weights.final_norm if last else layers[index + 1].attention_norm
            hidden, residual = self._add_rms_norm(
                self._mlp(layer.mlp, hidden), residual, norm, self._epsilon
            )
        return hidden

    @override
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._head(hidden, self._weights.head)

    @staticmethod
    @override
    def check(config: ModelConfig) -> None:
        if config.activation != "silu":
            raise ModelError(f"activation {config.activation!r} is not supported, only 'silu'")
        if config.attention_bias or config.mlp_bias:
            raise ModelError("biases in attention or MLP of a llama model are not supported")
        # Refuses unsupported rotary embeddings before any weight is read.
        rotary_table(config.rope, config.head_size, context_tokens=1)

    @staticmethod
    @override
    def weight_elements(config: ModelConfig, shard: ShardPlan) -> int:
        hidden = config.hidden_size
        heads = 2 * len(shard.query_heads) + 2 * len(shard.kv_heads)
        layer = hidden * (heads * config.head_size + 3 * len(shard.intermediate) + 2)
        tables = 1 if config.tied_embeddings else 2
        vocabulary = tables * len(shard.vocabulary_rows) * hidden
        return config.layers_count * layer + vocabulary + hidden

    @staticmethod
    @override
    def load(reader: ShardReader) -> DecoderWeights:
        config = reader.config
        table = (config.vocabulary_size, config.hidden_size)
        rows = reader.shard.vocabulary_rows
        embedding = reader.rows(RowPart("model.embed_tokens.weight", table, rows))
        head = (
            embedding
            if config.tied_embeddings
            else reader.rows(RowPart("lm_head.weight", table, rows))
        )
        layers = tuple(_load_layer(reader, index) for index in range(config.layers_count))
        final_norm = reader.whole("model.norm.weight", (config.hidden_size,))
        return DecoderWeights(embedding, layers, final_norm, head, reader.bytes_read)

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
        return {
            **dict.fromkeys(_OPERATIONS, plain),
            **dict.fromkeys(_CACHE_OPERATIONS, cached),
        }


def _load_layer(reader: ShardReader, index: int) -> LayerWeights:
    config, shard = reader.config, reader.shard
    prefix = f"model.layers.{index}"
    hidden, head = config.hidden_size, config.head_size
    query_shape = (config.query_heads * head, hidden)
    kv_shape = (config.kv_heads * head, hidden)
    mlp_shape = (config.intermediate_size, hidden)
    query_rows = range(shard.query_heads.start * head, shard.query_heads.stop * head)
    kv_rows = range(shard.kv_heads.start * head, shard.kv_heads.stop * head)
    attention = AttentionWeights(
        query_key_value=reader.rows(
            RowPart(f"{prefix}.self_attn.q_proj.weight", query_shape, query_rows),
            RowPart(f"{prefix}.self_attn.k_proj.weight", kv_shape, kv_rows),
            RowPart(f"{prefix}.self_attn.v_proj.weight", kv_shape, kv_rows),
        ),
        output=reader.columns(
            f"{prefix}.self_attn.o_proj.weight", (hidden, config.query_heads * head), query_rows
        ),
    )
    mlp = MLPWeights(
        gate_up=reader.rows(
            RowPart(f"{prefix}.mlp.gate_proj.weight", mlp_shape, shard.intermediate),
            RowPart(f"{prefix}.mlp.up_proj.weight", mlp_shape, shard.intermediate),
        ),
        down=reader.columns(
            f"{prefix}.mlp.down_proj.weight",
            (hidden, config.intermediate_size),
            shard.intermediate,
        ),
    )
    return LayerWeights(
        attention_norm=reader.whole(f"{prefix}.input_layernorm.weight", (hidden,)),
        attention=attention,
        mlp_norm=reader.whole(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        mlp=mlp,
    )
