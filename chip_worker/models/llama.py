"""The Llama architecture: Llama 1 to 3, SmolLM, and others that say so."""

from typing_extensions import override

from chip_worker.model_config import ConfigFields, ModelConfig
from chip_worker.models.configuration import decoder_config
from chip_worker.models.decoder import DecoderModel


class LlamaModel(DecoderModel):
    """The plain decoder; biases where the checkpoint says so."""

    @staticmethod
    @override
    def configure(fields: ConfigFields) -> ModelConfig:
        biased = fields.flag("attention_bias", False)
        return decoder_config(
            fields,
            query_key_value_bias=biased,
            output_bias=biased,
            mlp_bias=fields.flag("mlp_bias", False),
        )
