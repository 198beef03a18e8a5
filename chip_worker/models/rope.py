"""Rotary position embedding: what a checkpoint says of it, and the table made of that.

Kinds and formulas are those of transformers' `modeling_rope_utils.py`, in float32 as there.
"""

import math

import torch

from chip_worker.errors import ModelError
from chip_worker.model_config import ConfigFields, RopeConfig

KINDS = ("default", "linear", "llama3", "yarn")

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def read_rope(
    parameters: ConfigFields, base: float, head_size: int, context_tokens: int
) -> RopeConfig:
    """parameters: rope_parameters or, in older files, rope_scaling; base: where it has none.

    Raises ModelError naming what cannot be computed here.
    """
    kind = _supported_kind(parameters)
    divisors = parameters.numbers("divisors")
    if divisors and len(divisors) != head_size // 2:
        raise ModelError(
            f"{parameters.source}: {len(divisors)} divisors of the frequencies of rotary "
            f"embedding (rope_freqs.weight), expected {head_size // 2}"
        )
    for name in () if divisors else _REQUIRED[kind]:
        if parameters.number(name) <= 0:
            raise parameters.wrong(name, "not above 0")
    low_frequency = parameters.number("low_freq_factor", 1.0)
    high_frequency = parameters.number("high_freq_factor", 4.0)
    if kind == "llama3" and low_frequency >= high_frequency:
        raise parameters.wrong("low_freq_factor", "not below high_freq_factor")
    rotary_size = int(head_size * parameters.number("partial_rotary_factor", 1.0))
    if rotary_size != head_size:
        raise ModelError(
            f"{parameters.source}: rotary embedding over {rotary_size} of {head_size} dimensions "
            "is not supported, only over all of them"
        )
    factor = parameters.number("factor", 1.0)
    return RopeConfig(
        kind=kind,
        base=parameters.number("rope_theta", base),
        rotary_size=rotary_size,
        factor=factor,
        original_tokens=parameters.integer("original_max_position_embeddings", context_tokens),
        low_frequency=low_frequency,
        high_frequency=high_frequency,
        divisors=divisors,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncated=parameters.flag("truncate", True),
        attention_factor=_attention_factor(parameters, factor) if kind == "yarn" else None,
    )


def rotary_table(rope: RopeConfig, head_size: int, context_tokens: int) -> torch.Tensor:
    """Cosines and sines of every position: host float32 [context_tokens, head_size]."""
    assert rope.rotary_size == head_size, "read_rope refuses rotation of a part"
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = _scaled(rope, 1.0 / torch.pow(rope.base, exponents))
    angles = torch.arange(context_tokens, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return table if rope.attention_factor is None else table * rope.attention_factor


def _supported_kind(parameters: ConfigFields) -> str:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "dynamic":
        raise ModelError(
            f"{parameters.source}: rotary embedding of kind 'dynamic' is not supported: its angles "
            "depend on the length of the whole text, so that no key could be cached; known: "
            f"{', '.join(KINDS)}"
        )
    if kind not in KINDS:
        raise ModelError(
            f"{parameters.source}: unknown rotary embedding {kind!r}; known: {', '.join(KINDS)}"
        )
    return kind


def _attention_factor(parameters: ConfigFields, factor: float) -> float:
    """What yarn multiplies cosines and sines by: given, or of the factor's logarithm.

    In GGUF a multiplier of it is given.
    """
    if parameters.has("attention_factor"):
        return parameters.number("attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    multiplier = parameters.number("attention_multiplier", 1.0)
    scale, scale_all = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if scale and scale_all:
        return multiplier * magnitude(scale) / magnitude(scale_all)
    return multiplier * magnitude(1.0)


def _scaled(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    if rope.divisors:
        return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    match rope.kind:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies)
        case _:
            return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between mixed.

    periods of a wave in the original context:   low_frequency   high_frequency
                                     stretched |        mixed       | kept
    """
    periods = rope.original_tokens * frequencies / (2 * math.pi)
    kept = (periods - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """As llama3, but the mixture is linear in the dimension: kept before low, stretched after
    high, the dimensions that turn beta_fast and beta_slow times in the original context."""
    size, context = rope.rotary_size, rope.original_tokens

    def dimension(turns: float) -> float:
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
