"""Configurations as published for real models are read as their authors mean them."""

from types import SimpleNamespace

import pytest

from chip_worker.errors import ModelError
from chip_worker.gguf_fields import read_gguf_fields
from chip_worker.kv_groups import group_layers
from chip_worker.model_config import ConfigFields
from chip_worker.models.gemma3 import Gemma3Model
from chip_worker.models.llama import LlamaModel
from chip_worker.models.mistral import MistralModel
from chip_worker.models.qwen2 import Qwen2Model
from chip_worker.models.qwen3 import Qwen3Model

LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
}
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA_3_4B_TEXT = {
    "model_type": "gemma3",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def read(model, values, **changes):
    return model.configure(ConfigFields("config.json", values | changes))


def test_llama_3_1():
    config = read(LlamaModel, LLAMA_3_1_8B)
    assert (config.head_size, config.kv_heads, config.layer_windows) == (128, 8, ())
    assert (config.rope.kind, config.rope.base, config.rope.factor) == ("llama3", 5e5, 8.0)
    assert config.rope.original_tokens == 8192
    assert not config.query_key_value_bias
    assert config.score_scale == pytest.approx(128**-0.5)


def test_qwen_2_5_has_biases_and_a_window_only_if_it_is_used():
    config = read(Qwen2Model, QWEN2_5_7B)
    assert (config.query_key_value_bias, config.output_bias) == (True, False)
    assert config.layer_windows == ()
    used = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}
    windows = read(Qwen2Model, QWEN2_5_7B, **used).layer_windows
    assert windows == (0,) * 21 + (4096,) * 7


def test_qwen_3_has_heads_of_128_where_it_says_nothing():
    config = read(Qwen3Model, QWEN2_5_7B, num_attention_heads=32)
    assert (config.head_size, config.query_key_norm) == (128, True)


def test_mistral_has_a_window_unless_it_says_null():
    values = LLAMA_3_1_8B | {"rope_scaling": None}
    assert read(MistralModel, values).layer_windows == (4096,) * 32
    assert read(MistralModel, values, sliding_window=None).layer_windows == ()


def test_gemma_3_leaves_out_what_is_always_so():
    config = read(Gemma3Model, GEMMA_3_4B_TEXT)
    assert (config.query_heads, config.kv_heads, config.head_size) == (8, 4, 256)
    assert (config.vocabulary_size, config.context_tokens) == (262208, 131072)
    assert config.layer_windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert (config.rope.kind, config.rope.factor, config.rope.base) == ("linear", 8.0, 1e6)
    assert config.window_rope is not None
    assert (config.window_rope.kind, config.window_rope.base) == ("default", 1e4)
    assert (config.activation, config.tied_embeddings) == ("gelu_pytorch_tanh", True)
    assert (config.norm_offset, config.output_norms) == (1.0, True)
    assert config.embedding_scale == pytest.approx(2560**0.5)
    assert config.score_scale == pytest.approx(1 / 16)


def test_layers_with_a_rope_of_their_own_keep_a_window_that_no_text_exceeds():
    """It tells the rope; elsewhere it would only cost."""
    short = {"max_position_embeddings": 1024}
    assert read(Gemma3Model, GEMMA_3_4B_TEXT, **short).layer_windows[:6] == (1024,) * 5 + (0,)
    values = LLAMA_3_1_8B | {"rope_scaling": None, "max_position_embeddings": 4096}
    assert read(MistralModel, values).layer_windows == ()


def gguf_gemma(**changes):
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 18,
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": 640,
        "gemma3.feed_forward_length": 2048,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1e6,
    }
    shapes = {"token_embd.weight": (262144, 640)}
    fields = read_gguf_fields("model.gguf", metadata | changes, shapes, [])
    return Gemma3Model.configure(fields)


def test_gemma_3_in_gguf_has_complete_norms_and_a_fixed_pattern():
    config = gguf_gemma()
    assert config.layer_windows == ((512,) * 5 + (0,)) * 3
    assert (config.norm_offset, config.tied_embeddings) == (0.0, True)
    assert config.score_scale == pytest.approx(1 / 16)
    assert config.window_rope is not None
    assert config.window_rope.base == 1e4


def test_the_largest_gemma_3_in_gguf_scales_by_another_number():
    sizes = {
        "gemma3.block_count": 62,
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.attention.value_length": 128,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = gguf_gemma(**sizes)
    assert config.score_scale == pytest.approx(168**-0.5)
    assert (config.rope.kind, config.rope.factor) == ("linear", 8.0)
    assert config.window_rope is not None
    assert config.window_rope.kind == "default"


@pytest.mark.parametrize(
    ("model", "values", "changes", "named"),
    [
        (Gemma3Model, GEMMA_3_4B_TEXT, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (Gemma3Model, GEMMA_3_4B_TEXT, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (Gemma3Model, GEMMA_3_4B_TEXT, {"sliding_window": -1}, "sliding_window"),
        (Gemma3Model, GEMMA_3_4B_TEXT, {"final_logit_softcapping": -1.0}, "logit_soft_cap"),
        (MistralModel, LLAMA_3_1_8B, {"sliding_window": -1}, "sliding_window"),
    ],
)
def test_numbers_without_a_meaning_are_refused_by_name(model, values, changes, named):
    with pytest.raises(ModelError, match=f"{named}.*-?[01]"):
        read(model, values, **changes)


def test_more_kv_groups_than_the_control_plane_accepts_are_refused_by_number():
    """One layer sees all, so that each of the others is a group of its own."""
    values = GEMMA_3_4B_TEXT | {"num_hidden_layers": 257, "sliding_window_pattern": 257}
    assert len(group_layers(read(Gemma3Model, values).layer_windows[1:]).windows) == 256
    checkpoint = SimpleNamespace(fields=ConfigFields("config.json", values))
    with pytest.raises(ModelError, match=r"layer_windows: .* 257 KV groups; at most 256"):
        Gemma3Model.describe(checkpoint)


def gguf_llama(divisors=(), **changes):
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }
    shapes = {"token_embd.weight": (256, 64)}
    fields = read_gguf_fields("model.gguf", metadata | changes, shapes, divisors)
    return LlamaModel.configure(fields)


def test_divisors_of_a_gguf_are_those_of_llama3_and_go_with_no_other_scaling():
    assert gguf_llama([1.0] * 8).rope.divisors == (1.0,) * 8
    with pytest.raises(ModelError, match=r"rope_freqs.weight and llama.rope.scaling.type 'yarn'"):
        gguf_llama([1.0] * 8, **{"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4})


def test_rotation_of_a_part_is_refused_in_a_gguf_that_names_no_head_size():
    with pytest.raises(ModelError, match="8 of 16 dimensions"):
        gguf_llama(**{"llama.rope.dimension_count": 8})
