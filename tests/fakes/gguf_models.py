"""A reference model as a GGUF file, with the metadata and tensors llama.cpp's converter writes."""

import math
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.fakes.reference_models import ReferenceModel

_ARCHITECTURES = {"gemma3_text": "gemma3"}


def write_gguf_model(file: Path, model: ReferenceModel) -> str:
    """Everything in float32; returns the path."""
    config = {key: value for key, value in model.config.items() if value is not None}
    name = str(config["model_type"])
    writer = gguf.GGUFWriter(str(file), _ARCHITECTURES.get(name, name))
    _write_sizes(writer, config)
    _write_rope(writer, config)
    tensors: dict[str, np.ndarray] = {}
    for part in sorted(model.path.glob("*.safetensors")):
        tensors |= load_file(part)
    arch = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}[writer.arch]
    names = gguf.get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    for tensor_name, values in tensors.items():
        stored = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        if writer.arch == "llama" and (".q_proj." in tensor_name or ".k_proj." in tensor_name):
            values = _pairs(values, _head_size(config))
        if writer.arch == "gemma3" and tensor_name.endswith("norm.weight"):
            values = values + np.float32(1)
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


def _head_size(config: dict[str, object]) -> int:
    return int(
        config.get("head_dim", int(config["hidden_size"]) // int(config["num_attention_heads"]))
    )


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if writer.arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])


def _write_rope(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta")))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            default = 0.1 * math.log(rope["factor"]) + 1
            writer.add_rope_scaling_attn_factors(rope["attention_factor"] / default)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config, rope))


def _llama3_divisors(config: dict[str, object], rope: dict[str, float]) -> np.ndarray:
    size, context = _head_size(config), rope["original_max_position_embeddings"]
    base = rope.get("rope_theta", config.get("rope_theta"))
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for place in range(0, size, 2):
        wave = 2 * math.pi * base ** (place / size)
        if wave < context / high:
            divisors.append(1.0)
        elif wave > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def _pairs(values: np.ndarray, head_size: int) -> np.ndarray:
    """The converter's order of rows: (x[0], x[d/2], x[1], x[d/2 + 1], ...) within a head."""
    halves = values.reshape(-1, 2, head_size // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
