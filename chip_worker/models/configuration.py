"""From the fields of a checkpoint to the configuration of a decoder: what architectures share."""

from collections.abc import Callable
from typing import Any

from chip_worker.model_config import ConfigFields, ModelConfig, RopeConfig
from chip_worker.models.rope import read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
_BASE = 10000.0


def decoder_config(
    fields: ConfigFields, layer_windows: tuple[int, ...] = (), **own: object
) -> ModelConfig:
    """Sizes, norms and rotary embedding of a decoder; own: what the architecture adds or reads
    otherwise. Raises ModelError naming source and field."""
    query_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_size = fields.integer("head_dim", hidden_size // max(1, query_heads))
    context_tokens = fields.integer("max_position_embeddings")
    value_size = fields.integer("value_head_dim", head_size)
    if value_size != head_size:
        raise fields.wrong(
            "value_head_dim", f"and the size of a key is {head_size}; only one size is supported"
        )
    if "window_rope" not in own and max(layer_windows, default=0) >= context_tokens:
        # No text exceeds it, so it is none and costs nothing.
        layer_windows = ()
    shared: dict[str, Any] = {
        "architecture": fields.text("model_type"),
        "layers_count": fields.integer("num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "query_heads": query_heads,
        "kv_heads": fields.integer("num_key_value_heads", query_heads),
        "head_size": head_size,
        "vocabulary_size": fields.integer("vocab_size"),
        "context_tokens": context_tokens,
        "norm_epsilon": fields.number("rms_norm_eps"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "activation": fields.text("hidden_act", "silu"),
        "rope": _read_single_rope(fields, head_size),
        "layer_windows": layer_windows,
    }
    return ModelConfig(**(shared | own))


def read_windows(
    fields: ConfigFields, window: int, slides: Callable[[int], bool]
) -> tuple[int, ...]:
    """Of every layer the tokens it sees, 0 for all; empty if all see all.

    window: of layers that have one, 0 if none has. slides: which do in files without layer_types.
    """
    layers_count = fields.integer("num_hidden_layers")
    if window < 0:
        raise fields.wrong("sliding_window", "below 0")
    if fields.has("layer_types"):
        sliding = _listed(fields, layers_count)
        if any(sliding) and not window:
            raise fields.wrong("layer_types", "but no sliding_window is set or it is not used")
    else:
        sliding = [window > 0 and slides(layer) for layer in range(layers_count)]
    return tuple(window if each else 0 for each in sliding) if any(sliding) else ()


def read_late_windows(fields: ConfigFields) -> tuple[int, ...]:
    """Windows as Qwen has them: only if use_sliding_window is set, and not in the first layers."""
    used = fields.flag("use_sliding_window", False)
    # Both defaults are those of transformers' Qwen2Config and Qwen3Config.
    first = fields.integer("max_window_layers", 28)
    window = fields.integer("sliding_window", 4096) if used else 0
    return read_windows(fields, window, lambda layer: layer >= first)


def _listed(fields: ConfigFields, layers_count: int) -> list[bool]:
    kinds = fields.items("layer_types")
    if len(kinds) != layers_count:
        raise fields.wrong("layer_types", f"not one for each of {layers_count} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise fields.wrong("layer_types", f"and {kind!r} is none of {FULL}, {SLIDING}")
    return [kind == SLIDING for kind in kinds]


def _read_single_rope(fields: ConfigFields, head_size: int) -> RopeConfig:
    """The rotary embedding of all layers, or of those that see all tokens."""
    context = fields.integer("max_position_embeddings")
    base = fields.number("rope_theta", _BASE)
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    name = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
    parameters = fields.nested(name)
    if parameters.has(FULL):
        parameters = parameters.nested(FULL)
    outer = ("partial_rotary_factor", "original_max_position_embeddings")
    return read_rope(
        parameters.filled({each: fields.values[each] for each in outer if fields.has(each)}),
        base,
        head_size,
        context,
    )
