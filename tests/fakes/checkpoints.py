"""Tiny random Llama checkpoints, written as a Hugging Face directory or as a GGUF file.

Both come from the same tensors, with Hugging Face names and shapes, so that what is read back can
be compared. Run as a script it writes one: `python tests/fakes/checkpoints.py DIRECTORY`.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class TinyLlama:
    """Sizes of a random model; the defaults have uneven heads and an awkward vocabulary."""

    layers: int = 2
    query_heads: int = 6
    kv_heads: int = 2
    head_size: int = 8
    hidden: int = 32
    intermediate: int = 96
    vocabulary: int = 197
    context: int = 128
    tied: bool = True
    rope_base: float = 10000.0
    seed: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights in float32, large enough that attention and MLP matter."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        def norm() -> torch.Tensor:
            return 1.0 + 0.2 * torch.randn(self.hidden, generator=generator)

        query, kv = self.query_heads * self.head_size, self.kv_heads * self.head_size
        # Ids spread far apart, so that the greedy choice is seldom near a tie.
        found = {
            "model.embed_tokens.weight": normal(self.vocabulary, self.hidden) * 4,
            "model.norm.weight": norm(),
        }
        if not self.tied:
            found["lm_head.weight"] = normal(self.vocabulary, self.hidden) * 4
        for index in range(self.layers):
            prefix = f"model.layers.{index}"
            found |= {
                f"{prefix}.input_layernorm.weight": norm(),
                f"{prefix}.post_attention_layernorm.weight": norm(),
                f"{prefix}.self_attn.q_proj.weight": normal(query, self.hidden) * 2,
                f"{prefix}.self_attn.k_proj.weight": normal(kv, self.hidden) * 2,
                f"{prefix}.self_attn.v_proj.weight": normal(kv, self.hidden),
                f"{prefix}.self_attn.o_proj.weight": normal(self.hidden, query),
                f"{prefix}.mlp.gate_proj.weight": normal(self.intermediate, self.hidden),
                f"{prefix}.mlp.up_proj.weight": normal(self.intermediate, self.hidden),
                f"{prefix}.mlp.down_proj.weight": normal(self.hidden, self.intermediate),
            }
        return found

    def hugging_face_config(self) -> dict[str, object]:
        """The config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_base,
            "tie_word_embeddings": self.tied,
        }


def write_hugging_face(
    directory: Path,
    model: TinyLlama,
    files_count: int = 1,
    config_changes: dict[str, object] | None = None,
    without: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> str:
    """Writes config.json and `files_count` safetensors files; returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.hugging_face_config() | (config_changes or {})
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor.to(dtype) for name, tensor in model.tensors().items() if name not in without
    }
    if files_count == 1:
        save_file(tensors, directory / "model.safetensors")
        return str(directory)
    weight_map: dict[str, str] = {}
    for number in range(files_count):
        file_name = f"model-{number + 1:05}-of-{files_count:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[number::files_count]}
        save_file(part, directory / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(directory)


def write_gguf(
    file: Path,
    model: TinyLlama,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, str | int | float] | None = None,
    without: tuple[str, ...] = (),
) -> str:
    """Writes a GGUF file as llama.cpp's converter does: matrices in `kind`, norms in float32."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.query_heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_size)
    writer.add_rope_freq_base(model.rope_base)
    writer.add_rope_dimension_count(model.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocabulary)
    writer.add_token_list([f"token {index} é" for index in range(model.vocabulary)])
    writer.add_token_types([index % 7 for index in range(model.vocabulary)])
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.layers)
    for name, tensor in model.tensors().items():
        if name in without:
            continue
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _pairs_from_halves(values, model.head_size)
        # As the converter does: what does not divide into quantization blocks stays a float.
        block_elements, _ = gguf.GGML_QUANT_SIZES[kind]
        fits = values.ndim == 2 and values.shape[1] % block_elements == 0
        stored = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)),
            gguf.quants.quantize(np.ascontiguousarray(values), stored),
            raw_dtype=stored,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def _pairs_from_halves(values: np.ndarray, head_size: int) -> np.ndarray:
    """The converter's order of rows: (x[0], x[d/2], x[1], x[d/2 + 1], ...) within a head."""
    heads = values.shape[0] // head_size
    halves = values.reshape(heads, 2, head_size // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


if __name__ == "__main__":
    write_hugging_face(Path(sys.argv[1]), TinyLlama())
