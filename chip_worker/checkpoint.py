"""Checkpoint contract: weights on disk, read by name and by the part a rank needs."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig


@dataclass(frozen=True)
class ModelFingerprint:
    """What makes two workers able to serve the same model; digest is hexadecimal."""

    architecture: str
    digest: str
    context_tokens: int
    vocabulary_size: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the file declares it; shape is rows first, as torch has it."""

    shape: tuple[int, ...]
    type_name: str


class Checkpoint(ABC):
    """An open checkpoint. Tensor names are those of Hugging Face, whatever the file calls them."""

    def __init__(self, path: str, config: ModelConfig) -> None:
        self.path = path
        self.config = config

    @abstractmethod
    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor of that name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError if it is missing."""

    @abstractmethod
    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor, or the named part of it, in host memory and a floating dtype of the file.

        Rows of query and key projections must be whole heads, in half-rotation order. Raises
        ModelError if it is missing.
        """

    @abstractmethod
    def fingerprint(self) -> ModelFingerprint:
        """Identity of the model; reads no weights."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file; tensors read before stay valid."""

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError if the tensor is missing or has another shape."""
        found = self.shape(name)
        if found != shape:
            raise ModelError(f"{self.path}: tensor {name} has shape {found}, expected {shape}")


def fingerprint_of(
    config: ModelConfig, entries: Mapping[str, TensorEntry], files_bytes: int
) -> ModelFingerprint:
    """The fingerprint of a configuration and tensor table, with the size of all files together."""
    facts = {
        "config": asdict(config),
        "tensors": {name: asdict(entry) for name, entry in entries.items()},
        "files_bytes": files_bytes,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return ModelFingerprint(
        architecture=config.architecture,
        digest=digest,
        context_tokens=config.context_tokens,
        vocabulary_size=config.vocabulary_size,
    )
