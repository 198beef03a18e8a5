"""Architectures this worker knows, by the names that config.json and GGUF files give them."""

from chip_worker.checkpoint import Checkpoint
from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig
from chip_worker.models.gemma3 import Gemma3Model
from chip_worker.models.llama import LlamaModel
from chip_worker.models.mistral import MistralModel
from chip_worker.models.model import Model
from chip_worker.models.qwen2 import Qwen2Model
from chip_worker.models.qwen3 import Qwen3Model

ARCHITECTURES: dict[str, type[Model]] = {
    "llama": LlamaModel,
    "mistral": MistralModel,
    "qwen2": Qwen2Model,
    "qwen3": Qwen3Model,
    "gemma3": Gemma3Model,
    "gemma3_text": Gemma3Model,
}


def find_model(checkpoint: Checkpoint) -> tuple[type[Model], ModelConfig]:
    """The code for a checkpoint, and what it holds, all of it checked. Raises ModelError."""
    architecture = checkpoint.fields.text("model_type")
    found = ARCHITECTURES.get(architecture)
    if found is None:
        raise ModelError(
            f"{checkpoint.path}: unknown architecture {architecture!r}; known: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found, found.describe(checkpoint)
