"""The configuration in a GGUF file's metadata, by the names of config.json.

Keys and what they mean are those of llama.cpp (`llama-arch.cpp`, `llama-context.cpp`).
"""

from collections.abc import Mapping, Sequence

from chip_worker.errors import ModelError
from chip_worker.model_config import ConfigFields

_NAMES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "value_head_dim": "attention.value_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_ROPE_NAMES = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "attention_multiplier": "rope.scaling.attn_factor",
}


def read_gguf_fields(
    path: str,
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: Sequence[float],
) -> ConfigFields:
    """shapes: of the tensors; rope_divisors: what the tensor rope_freqs.weight holds.

    Raises ModelError where the file does not even say what it is.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path}: field general.architecture is missing")
    parts = metadata.get("split.count", 1)
    if parts != 1:
        raise ModelError(
            f"{path}: one of {parts} parts of a model; join them with llama-gguf-split --merge"
        )
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    names = {name: f"{architecture}.{key}" for name, key in _NAMES.items()}
    rope_names = {name: f"{architecture}.{key}" for name, key in _ROPE_NAMES.items()}
    values = {
        # Neither stands in every file.
        "vocab_size": embedding[0],
        **_found(metadata, names),
        "model_type": architecture,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    rope = _rope(path, architecture, metadata, _found(metadata, rope_names), values, rope_divisors)
    shown = names | {
        f"rope_parameters.full_attention.{name}": key for name, key in rope_names.items()
    }
    return ConfigFields(path, values | {"rope_parameters": rope}, shown, from_gguf=True)


def _found(metadata: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {name: metadata[key] for name, key in names.items() if key in metadata}


def _head_size_by_default(values: Mapping[str, object]) -> int | None:
    hidden_size, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if isinstance(hidden_size, int) and isinstance(heads, int) and heads:
        return hidden_size // heads
    return None


def _rope(
    path: str,
    architecture: str,
    metadata: Mapping[str, object],
    rope: dict[str, object],
    values: Mapping[str, object],
    divisors: Sequence[float],
) -> dict[str, object]:
    """Of the layers that see all tokens; gemma3 alone has others, whose rope is never scaled."""
    # A factor without a type is linear; without a factor even that says nothing.
    kind = rope.get("rope_type", "linear")
    if kind == "none" or (kind == "linear" and not rope.get("factor")):
        rope["rope_type"] = "default"
    else:
        rope["rope_type"] = kind
    if divisors:
        if rope["rope_type"] not in ("default", "llama3"):
            raise ModelError(
                f"{path}: rope_freqs.weight and {architecture}.rope.scaling.type {kind!r} "
                "contradict each other; a file has one or the other"
            )
        rope |= {"rope_type": "llama3", "divisors": list(divisors)}
    if "mscale_all_dim" in rope:
        rope["mscale"] = 1.0
    rotated = metadata.get(f"{architecture}.rope.dimension_count")
    head_size = values.get("head_dim") or _head_size_by_default(values)
    if isinstance(rotated, int) and isinstance(head_size, int) and head_size:
        rope["partial_rotary_factor"] = rotated / head_size
    return {"full_attention": rope}
