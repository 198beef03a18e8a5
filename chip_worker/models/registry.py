"""Architectures this worker knows, by the name checkpoints give them."""

from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig
from chip_worker.models.llama import LlamaModel
from chip_worker.models.model import Model

ARCHITECTURES: dict[str, type[Model]] = {"llama": LlamaModel}


def find_model(config: ModelConfig) -> type[Model]:
    """The code for a model, checked against its configuration. Raises ModelError."""
    found = ARCHITECTURES.get(config.architecture)
    if found is None:
        raise ModelError(
            f"unknown architecture {config.architecture!r}; known: {', '.join(ARCHITECTURES)}"
        )
    found.check(config)
    return found
