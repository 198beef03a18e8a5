"""Weights of a decoder: which tensors of a checkpoint a rank holds, as one plan that is checked,
counted and loaded.

query, key, value, gate, up: some rows a rank; output, down: some columns, and their biases on
rank 0 alone, for the products of all ranks are added. Norms are whole everywhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backends.interface import Matrix
from chip_worker.model_config import ModelConfig
from chip_worker.tensor_parallel import ShardPlan
from chip_worker.weights import Piece, Pieces, ShardReader

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class AttentionWeights:
    """query_key_value [(h + 2k) * d, H], rows of the three below each other; output [H, h * d];
    query_norm and key_norm [d]."""

    query_key_value: Matrix
    output: Matrix
    query_key_value_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class MLPWeights:
    """gate_up [2I, H], gate over up; down [H, I]."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the norms are [H], those of outputs only some architectures have."""

    attention_norm: torch.Tensor
    attention: AttentionWeights
    mlp_norm: torch.Tensor
    mlp: MLPWeights
    attention_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a rank; embedding and head are [V, H] and one matrix where they are tied."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    bytes_total: int


@dataclass(frozen=True)
class LayerPlan:
    """Pieces of a layer's tensors, by the fields of LayerWeights, AttentionWeights, MLPWeights."""

    norms: Mapping[str, Pieces]
    attention: Mapping[str, Pieces]
    mlp: Mapping[str, Pieces]


class DecoderPlan:
    """All tensors of a rank's shard, as pieces of what is stored."""

    def __init__(self, config: ModelConfig, shard: ShardPlan) -> None:
        self._config = config
        self._shard = shard
        self.layers = tuple(self._layer(f"model.layers.{n}") for n in range(config.layers_count))
        self.embedding = self._table(EMBEDDING)
        self.head = None if config.tied_embeddings else self._table(HEAD)
        self.final_norm = self._norm(FINAL_NORM, config.hidden_size)

    def tensors(self) -> Iterator[Pieces]:
        """Every tensor the rank will hold."""
        yield self.embedding
        yield self.final_norm
        if self.head is not None:
            yield self.head
        for layer in self.layers:
            yield from (*layer.norms.values(), *layer.attention.values(), *layer.mlp.values())

    def load(self, reader: ShardReader) -> DecoderWeights:
        """Reads them all. Raises ModelError or OutOfMemory."""

        def read(planned: Mapping[str, Pieces]) -> dict[str, Any]:
            return {name: reader.read(pieces) for name, pieces in planned.items()}

        embedding = reader.read(self.embedding)
        head = embedding if self.head is None else reader.read(self.head)
        layers = tuple(
            LayerWeights(
                attention=AttentionWeights(**read(layer.attention)),
                mlp=MLPWeights(**read(layer.mlp)),
                **read(layer.norms),
            )
            for layer in self.layers
        )
        final_norm = reader.read(self.final_norm)
        return DecoderWeights(embedding, layers, final_norm, head, reader.bytes_read)

    def _layer(self, prefix: str) -> LayerPlan:
        names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if self._config.output_norms:
            names |= {
                "attention_output_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_output_norm": "post_feedforward_layernorm",
            }
        size = self._config.hidden_size
        norms = {
            field: self._norm(f"{prefix}.{name}.weight", size) for field, name in names.items()
        }
        return LayerPlan(norms, self._attention(f"{prefix}.self_attn"), self._mlp(f"{prefix}.mlp"))

    def _attention(self, prefix: str) -> dict[str, Pieces]:
        config, shard, head = self._config, self._shard, self._config.head_size
        query = range(shard.query_heads.start * head, shard.query_heads.stop * head)
        held = range(shard.kv_heads.start * head, shard.kv_heads.stop * head)
        query_size, kv_size = config.query_heads * head, config.kv_heads * head
        parts = (
            ("q_proj", query_size, query),
            ("k_proj", kv_size, held),
            ("v_proj", kv_size, held),
        )
        planned = {
            "query_key_value": tuple(
                Piece(f"{prefix}.{name}.weight", (size, config.hidden_size), rows, grain=head)
                for name, size, rows in parts
            ),
            "output": self._columns(f"{prefix}.o_proj", query_size, query),
        }
        if config.query_key_value_bias:
            planned["query_key_value_bias"] = tuple(
                Piece(f"{prefix}.{name}.bias", (size,), rows, grain=head)
                for name, size, rows in parts
            )
        if config.output_bias:
            planned |= self._bias_of_sum("output_bias", f"{prefix}.o_proj")
        if config.query_key_norm:
            planned["query_norm"] = self._norm(f"{prefix}.q_norm.weight", head)
            planned["key_norm"] = self._norm(f"{prefix}.k_norm.weight", head)
        return planned

    def _mlp(self, prefix: str) -> dict[str, Pieces]:
        config, rows = self._config, self._shard.intermediate
        size, names = config.intermediate_size, (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        planned = {
            "gate_up": tuple(
                Piece(f"{name}.weight", (size, config.hidden_size), rows) for name in names
            ),
            "down": self._columns(f"{prefix}.down_proj", size, rows),
        }
        if config.mlp_bias:
            planned["gate_up_bias"] = tuple(Piece(f"{name}.bias", (size,), rows) for name in names)
            planned |= self._bias_of_sum("down_bias", f"{prefix}.down_proj")
        return planned

    def _table(self, name: str) -> Pieces:
        config = self._config
        shape = (config.vocabulary_size, config.hidden_size)
        return (Piece(name, shape, self._shard.vocabulary_rows),)

    def _norm(self, name: str, size: int) -> Pieces:
        return (Piece(name, (size,), offset=self._config.norm_offset),)

    def _columns(self, name: str, size: int, columns: range) -> Pieces:
        return (Piece(f"{name}.weight", (self._config.hidden_size, size), columns=columns),)

    def _bias_of_sum(self, field: str, name: str) -> dict[str, Pieces]:
        if self._shard.rank != 0:
            return {}
        return {field: (Piece(f"{name}.bias", (self._config.hidden_size,)),)}
