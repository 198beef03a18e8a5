"""The Qwen2 architecture: Qwen 1.5 to 2.5."""

from typing_extensions import override

from chip_worker.model_config import ConfigFields, ModelConfig
from chip_worker.models.configuration import decoder_config, read_late_windows
from chip_worker.models.decoder import DecoderModel


class Qwen2Model(DecoderModel):
    """Biases of queries, keys and values; later layers may have a window."""

    @staticmethod
    @override
    def configure(fields: ConfigFields) -> ModelConfig:
        return decoder_config(
            fields, query_key_value_bias=True, layer_windows=read_late_windows(fields)
        )
