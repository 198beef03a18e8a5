"""The Qwen3 architecture, dense."""

from typing_extensions import override

from chip_worker.model_config import ConfigFields, ModelConfig
from chip_worker.models.configuration import decoder_config, read_late_windows
from chip_worker.models.decoder import DecoderModel


class Qwen3Model(DecoderModel):
    """Queries and keys are normed head by head; later layers may have a window."""

    @staticmethod
    @override
    def configure(fields: ConfigFields) -> ModelConfig:
        if not fields.from_gguf:
            # The default of transformers' Qwen3Config.
            fields = fields.filled({"head_dim": 128})
        biased = fields.flag("attention_bias", False)
        return decoder_config(
            fields,
            query_key_norm=True,
            query_key_value_bias=biased,
            output_bias=biased,
            layer_windows=read_late_windows(fields),
        )
