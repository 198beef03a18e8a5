"""Weights from a Hugging Face directory: config.json and one or several safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from chip_worker.checkpoint import Checkpoint, TensorEntry
from chip_worker.errors import ModelError
from chip_worker.model_config import ConfigFields

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# How files of a model with images call its language part: older ones, and transformers 5.
_LANGUAGE_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))


class SafetensorsCheckpoint(Checkpoint):
    """A model in a directory; files are mapped, and a rank touches only the parts it reads."""

    def __init__(self, path: str) -> None:
        directory = Path(path)
        file = directory / "config.json"
        fields = ConfigFields(str(file), _language_part(_read_json(file)))
        self._slices: dict[str, Any] = {}
        self._stored_names: dict[str, str] = {}
        files = _weight_files(directory)
        super().__init__(path, fields, sum(_size_bytes(file) for file in files))
        for file, names in files.items():
            self._open(file, names)

    @override
    def stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)

    @override
    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        shape = self.shape(name)
        parts = tuple(
            slice(0, size) if part is None else slice(part.start, part.stop)
            for size, part in zip(shape, (rows, columns), strict=False)
        )
        found: torch.Tensor = self._slices[self.stored_name(name)][parts]
        return found

    @override
    def check_type(self, name: str) -> None:
        type_name = self.entries[self.stored_name(name)].type_name
        if type_name not in _FLOATS:
            raise ModelError(
                f"{self.path}: tensor {name} has type {type_name}, which is not one of "
                f"{', '.join(_FLOATS)}; quantized safetensors are not supported, use a float "
                "checkpoint or a GGUF"
            )

    @override
    def close(self) -> None:
        self._slices.clear()

    def _open(self, file: Path, names: set[str] | None) -> None:
        """names: the tensors the index expects in it; None for whatever there is."""
        try:
            opened: Any = safe_open(str(file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{file}: not a readable safetensors file, or cut short: {error}; fetch it again"
            ) from error
        found = set(opened.keys())
        for name in sorted(names or ()):
            if name not in found:
                raise ModelError(
                    f"{file}: tensor {name} is missing, and {_INDEX} says it is here; "
                    "fetch the checkpoint again"
                )
        for name in sorted(found if names is None else names):
            part = opened.get_slice(name)
            self._slices[name] = part
            self._stored_names[_plain_name(name)] = name
            self.entries[name] = TensorEntry(tuple(part.get_shape()), part.get_dtype())


def _weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Files that hold weights, and which of them if an index says so; others are ignored."""
    index = directory / _INDEX
    if index.exists():
        return _indexed_files(index)
    single = directory / "model.safetensors"
    found = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{directory}: no safetensors file")
    return dict.fromkeys(found)


def _indexed_files(index: Path) -> dict[Path, set[str] | None]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelError(f"{index}: field weight_map is missing")
    names: dict[str, set[str]] = {}
    for name, file_name in weight_map.items():
        names.setdefault(str(file_name), set()).add(str(name))
    for file_name in sorted(names):
        if not (index.parent / file_name).is_file():
            raise ModelError(
                f"{index.parent / file_name}: the file is missing, and {index.name} names it; "
                "fetch the checkpoint again"
            )
    return {index.parent / file_name: names[file_name] for file_name in sorted(names)}


def _size_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ModelError(f"{file}: not readable: {error}") from error


def _plain_name(name: str) -> str:
    for prefix, plain in _LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _language_part(values: Mapping[str, object]) -> Mapping[str, object]:
    """Of a model with images, the configuration of its language part under the whole's name."""
    part = values.get("text_config")
    if not isinstance(part, Mapping):
        return values
    of_whole = ("model_type", "tie_word_embeddings")
    return {**part, **{name: values[name] for name in of_whole if name in values}}


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: not a JSON object")
    return values
