"""Weights from a Hugging Face directory: config.json and one or several safetensors files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from chip_worker.checkpoint import Checkpoint, ModelFingerprint, TensorEntry, fingerprint_of
from chip_worker.errors import ModelError
from chip_worker.model_config import config_from_hugging_face


class SafetensorsCheckpoint(Checkpoint):
    """A model in a directory; files are mapped, and a rank touches only the parts it reads."""

    def __init__(self, path: str) -> None:
        directory = Path(path)
        values = _read_json(directory / "config.json")
        super().__init__(path, config_from_hugging_face(str(directory / "config.json"), values))
        self._files: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        self._entries: dict[str, TensorEntry] = {}
        self._files_bytes = 0
        for file in _weight_files(directory):
            self._open(file)

    @override
    def has(self, name: str) -> bool:
        return name in self._entries

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self._entries[name].shape

    @override
    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        shape = self.shape(name)
        parts = tuple(
            slice(0, size) if part is None else slice(part.start, part.stop)
            for size, part in zip(shape, (rows, columns), strict=False)
        )
        found: torch.Tensor = self._slices[name][parts]
        if not found.is_floating_point():
            raise ModelError(
                f"{self.path}: tensor {name} has type {self._entries[name].type_name}; "
                "quantized safetensors are not supported, use a float checkpoint"
            )
        return found

    @override
    def fingerprint(self) -> ModelFingerprint:
        return fingerprint_of(self.config, self._entries, self._files_bytes)

    @override
    def close(self) -> None:
        self._slices.clear()
        self._files.clear()

    def _open(self, file: Path) -> None:
        try:
            opened: Any = safe_open(str(file), framework="pt")
            self._files_bytes += file.stat().st_size
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: not a readable safetensors file: {error}") from error
        self._files[file.name] = opened
        for name in opened.keys():  # noqa: SIM118 - a safetensors file is no mapping
            part = opened.get_slice(name)
            self._slices[name] = part
            self._entries[name] = TensorEntry(tuple(part.get_shape()), part.get_dtype())


def _weight_files(directory: Path) -> list[Path]:
    """Files that hold weights: those of the index where there is one, else every one there is."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ModelError(f"{index}: field weight_map is missing")
        return [directory / name for name in sorted({str(name) for name in weight_map.values()})]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{directory}: no safetensors file")
    return found


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: not a JSON object")
    return values
