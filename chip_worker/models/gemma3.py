"""The Gemma 3 architecture, text only; of a model with images the language part."""

from typing_extensions import override

from chip_worker.errors import ModelError
from chip_worker.model_config import ConfigFields, ModelConfig
from chip_worker.models.configuration import decoder_config, read_windows
from chip_worker.models.decoder import DecoderModel
from chip_worker.models.rope import read_rope

# What no file need say: fixed in GGUF, and of transformers' Gemma3TextConfig.
_CONSTANTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}
# Also of Gemma3TextConfig: Google's config.json files leave out what equals them.
_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# GGUF does not hold the scale of scores: the head size, but for the 27B model, told by its layers.
_LAYERS_27B = 62


class Gemma3Model(DecoderModel):
    """Four norms a layer, GELU, scaled embeddings; most layers have a window and a rope of their
    own."""

    @staticmethod
    @override
    def configure(fields: ConfigFields) -> ModelConfig:
        fields = fields.filled(_CONSTANTS)
        fields = fields.filled(_gguf_scale(fields) if fields.from_gguf else _DEFAULTS)
        if fields.flag("use_bidirectional_attention", False):
            raise ModelError(
                f"{fields.source}: use_bidirectional_attention is set: such a model embeds whole "
                "texts and continues none; it is not supported"
            )
        head_size = fields.integer("head_dim")
        pattern = fields.integer("sliding_window_pattern")
        for name in ("sliding_window_pattern", "query_pre_attn_scalar"):
            if fields.number(name) <= 0:
                raise fields.wrong(name, "not above 0")
        biased = fields.flag("attention_bias", False)
        window_rope = read_rope(
            fields.nested("rope_parameters").nested("sliding_attention"),
            fields.number("rope_local_base_freq"),
            head_size,
            fields.integer("max_position_embeddings"),
        )
        return decoder_config(
            fields,
            activation=fields.text("hidden_activation"),
            query_key_norm=True,
            query_key_value_bias=biased,
            output_bias=biased,
            output_norms=True,
            window_rope=window_rope,
            layer_windows=read_windows(
                fields,
                fields.integer("sliding_window", 0),
                lambda layer: (layer + 1) % pattern != 0,
            ),
            attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
            logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
            embedding_scale=fields.integer("hidden_size") ** 0.5,
            norm_offset=0.0 if fields.from_gguf else 1.0,
        )


def _gguf_scale(fields: ConfigFields) -> dict[str, object]:
    if fields.integer("num_hidden_layers") != _LAYERS_27B:
        return {"query_pre_attn_scalar": fields.integer("head_dim")}
    hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return {"query_pre_attn_scalar": hidden_size // heads}
