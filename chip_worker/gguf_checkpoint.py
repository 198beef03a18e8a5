"""Weights from a GGUF file: memory-mapped, dequantized row by row when they are read."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFEndian, GGUFReader, GGUFValueType
from typing_extensions import override

from chip_worker.checkpoint import Checkpoint, ModelFingerprint, TensorEntry, fingerprint_of
from chip_worker.errors import ModelError
from chip_worker.model_config import config_from_gguf

# Architectures whose converter stores query and key rows pairwise: (x[0], x[d/2], x[1], ...).
_PAIRWISE_ROTARY = frozenset({"llama"})


class HeaderReader(GGUFReader):
    """A GGUFReader that steps over long arrays instead of making an object of every element.

    Numeric arrays are one part; string arrays (the tokenizer's, about 100,000 strings) are one part
    of raw bytes and have no contents.
    """

    @override
    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            found: tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]
            found = super()._get_field_parts(orig_offs, raw_type)
            return found
        element_type = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        kind = GGUFValueType(int(element_type[0]))
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            body = self.data[start : self._strings_end(start, int(count[0]))]
            indices: list[int] = []
        else:
            body = self._get(start, self.gguf_scalar_to_np[kind], int(count[0]))
            indices = [2]
        parts = [element_type, count, body]
        types = [GGUFValueType.ARRAY, kind] if count[0] else [GGUFValueType.ARRAY]
        return 12 + int(body.nbytes), parts, indices, types

    def _strings_end(self, start: int, count: int) -> int:
        unpack = struct.Struct("<Q" if self.endianess == GGUFEndian.LITTLE else ">Q").unpack_from
        view = self.data.data
        offset = start
        for _ in range(count):
            offset += 8 + int(unpack(view, offset)[0])
        return offset


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file.

    Rows of a quantized tensor are independent, so a rank dequantizes only the rows it holds.
    """

    def __init__(self, path: str) -> None:
        try:
            reader = HeaderReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path}: not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._entries = {
            name: TensorEntry(
                tuple(int(size) for size in reversed(tensor.shape.tolist())),
                tensor.tensor_type.name,
            )
            for name, tensor in self._tensors.items()
        }
        values = {name: field.contents() for name, field in reader.fields.items()}
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        config = config_from_gguf(path, values, shapes)
        super().__init__(path, config)
        self._names = _name_map(path, config.architecture, config.layers_count)

    @override
    def has(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[self._existing_name(name)].shape

    @override
    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        tensor = self._tensors[self._existing_name(name)]
        data = tensor.data if rows is None else tensor.data[rows.start : rows.stop]
        try:
            values = _dequantize(np.asarray(data), tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, "
                "which cannot be dequantized; convert the file to another type"
            ) from error
        if self.config.architecture in _PAIRWISE_ROTARY and _is_rotated(name):
            values = _halves_from_pairs(values, self.config.head_size)
        if columns is not None:
            values = values[:, columns.start : columns.stop]
        # What is not quantized is still the file's map, which must not be touched after close.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    @override
    def fingerprint(self) -> ModelFingerprint:
        return fingerprint_of(self.config, self._entries, Path(self.path).stat().st_size)

    @override
    def close(self) -> None:
        self._tensors.clear()

    def _stored_name(self, name: str) -> str:
        stored = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return name if stored is None else str(stored)

    def _existing_name(self, name: str) -> str:
        stored = self._stored_name(name)
        if stored not in self._tensors:
            raise ModelError(f"{self.path}: tensor {stored} ({name}) is missing")
        return stored


def _name_map(path: str, architecture: str, layers_count: int) -> gguf.TensorNameMap:
    for model, name in gguf.MODEL_ARCH_NAMES.items():
        if name == architecture:
            return gguf.get_tensor_name_map(model, layers_count)
    raise ModelError(f"{path}: unknown architecture {architecture!r}")


def _dequantize(data: npt.NDArray[Any], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """data [rows, bytes] -> [rows, columns]; a plain float32 tensor is returned as it is.

    gguf works on 16 rows at a time. Rows are whole quantization blocks, so several are joined to
    one long row first: half the time for a model with short rows.
    """
    if data.ndim == 1:
        rows_joined = 1
    else:
        rows_joined = next(joined for joined in (8, 4, 2, 1) if data.shape[0] % joined == 0)
        data = data.reshape(data.shape[0] // rows_joined, -1)
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(data, kind)
    if rows_joined > 1:
        values = values.reshape(values.shape[0] * rows_joined, -1)
    return values.astype(np.float32, copy=False)


def _is_rotated(name: str) -> bool:
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def _halves_from_pairs(values: npt.NDArray[np.float32], head_size: int) -> npt.NDArray[np.float32]:
    """Undoes the converter's order of rows within a head: pairs (i, i + d/2) stood side by side."""
    rows, columns = values.shape
    assert rows % head_size == 0, "query and key rows are read by whole heads"
    paired = values.reshape(rows // head_size, head_size // 2, 2, columns)
    halves: npt.NDArray[np.float32] = paired.swapaxes(1, 2).reshape(rows, columns)
    return halves
