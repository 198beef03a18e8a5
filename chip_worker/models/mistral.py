"""The Mistral architecture: Mistral 7B, Nemo, Small, Ministral."""

from typing_extensions import override

from chip_worker.model_config import ConfigFields, ModelConfig
from chip_worker.models.configuration import decoder_config, read_windows
from chip_worker.models.decoder import DecoderModel

# Of transformers' MistralConfig; a file says null where there is no window.
_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


class MistralModel(DecoderModel):
    """The plain decoder, with a window in all layers or in those that layer_types names."""

    @staticmethod
    @override
    def configure(fields: ConfigFields) -> ModelConfig:
        fields = fields.filled(_DEFAULTS)
        window = fields.integer("sliding_window", 0)
        return decoder_config(
            fields, layer_windows=read_windows(fields, window, lambda _layer: True)
        )
