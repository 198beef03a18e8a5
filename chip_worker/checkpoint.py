"""Checkpoint contract: weights on disk, read by name and by the part a rank needs."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from backends.interface import WeightForm
from chip_worker.errors import ModelError
from chip_worker.model_config import ConfigFields, ModelConfig


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
    """An open checkpoint. Tensor names are those of Hugging Face, whatever the file calls them.

    fields: its configuration, by the names of config.json. entries: its tensors, by the names that
    the file gives them.
    """

    def __init__(self, path: str, fields: ConfigFields, files_bytes: int) -> None:
        self.path = path
        self.fields = fields
        self.entries: dict[str, TensorEntry] = {}
        self._files_bytes = files_bytes

    @abstractmethod
    def stored_name(self, name: str) -> str:
        """What the file calls a tensor, or would if it had it."""

    @abstractmethod
    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor, or the named part of it, in host memory and a floating dtype of the file.

        Rows of query and key projections must be whole heads, in half-rotation order. Raises
        ModelError if it is missing.
        """

    def form(self, name: str) -> WeightForm:
        """The form of blocks that `read_blocks` can give a matrix in; default: none, plain."""
        self.shape(name)
        return WeightForm.PLAIN

    def read_blocks(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A matrix of such a form, or the named part, as its blocks: [n, bytes] uint8, on the host.

        Columns must be whole blocks, rows as for `read`.
        """
        raise NotImplementedError(f"{self.path} has no blocks of {name}")

    @abstractmethod
    def check_type(self, name: str) -> None:
        """Raises ModelError if the tensor's numbers cannot be read; reads little of it."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file; tensors read before stay valid."""

    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor of that name."""
        return self.stored_name(name) in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError if it is missing."""
        stored = self.stored_name(name)
        if stored not in self.entries:
            shown = name if stored == name else f"{stored} ({name})"
            raise ModelError(f"{self.path}: tensor {shown} is missing")
        return self.entries[stored].shape

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelError if the tensor is missing or has another shape."""
        found = self.shape(name)
        if found != shape:
            raise ModelError(f"{self.path}: tensor {name} has shape {found}, expected {shape}")

    def others(self, names: Iterable[str]) -> list[str]:
        """Tensors of the file that are none of these, as the file calls them."""
        known = {self.stored_name(name) for name in names}
        return [stored for stored in self.entries if stored not in known]

    def fingerprint(self, config: ModelConfig, weights: str) -> ModelFingerprint:
        """Identity of the model, read as `config`, held as `weights` says; reads no weights."""
        facts = {
            "config": asdict(config),
            "tensors": {name: asdict(entry) for name, entry in self.entries.items()},
            "files_bytes": self._files_bytes,
            "weights": weights,
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return ModelFingerprint(
            architecture=config.architecture,
            digest=digest,
            context_tokens=config.context_tokens,
            vocabulary_size=config.vocabulary_size,
        )
