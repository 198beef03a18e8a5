"""Weights from a GGUF file: memory-mapped, dequantized row by row when they are read."""

import struct
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFEndian, GGUFReader, GGUFValueType
from typing_extensions import override

from backends.interface import WeightForm
from chip_worker.checkpoint import Checkpoint, TensorEntry
from chip_worker.errors import ModelError
from chip_worker.gguf_fields import read_gguf_fields

# Architectures whose converter stores query and key rows pairwise: (x[0], x[d/2], x[1], ...).
_PAIRWISE_ROTARY = frozenset({"llama"})
_FORMS = {form.value: form for form in WeightForm if form is not WeightForm.PLAIN}

Number = TypeVar("Number", bound=np.generic)


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
    """A model in one GGUF file, mapped.

    Blocks of a quantized tensor are independent, so a rank dequantizes little more than it holds.
    """

    def __init__(self, path: str) -> None:
        try:
            reader = HeaderReader(path)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise ModelError(f"{path}: not a readable GGUF file, or cut short: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        entries = {
            name: TensorEntry(
                tuple(int(size) for size in reversed(tensor.shape.tolist())),
                tensor.tensor_type.name,
            )
            for name, tensor in self._tensors.items()
        }
        shapes = {name: entry.shape for name, entry in entries.items()}
        fields = read_gguf_fields(path, metadata, shapes, self._rope_divisors())
        super().__init__(path, fields, Path(path).stat().st_size)
        self.entries = entries
        self._pairwise = fields.text("model_type") in _PAIRWISE_ROTARY

    @override
    def stored_name(self, name: str) -> str:
        stored = self._name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        return name if stored is None else str(stored)

    @override
    def read(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        self.shape(name)
        tensor = self._tensors[self.stored_name(name)]
        data = tensor.data if rows is None else tensor.data[rows.start : rows.stop]
        try:
            values = _dequantize(np.asarray(data), tensor.tensor_type, columns)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {tensor.name} has type {tensor.tensor_type.name}, "
                "which cannot be dequantized; convert the file to another type"
            ) from error
        if self._pairwise and _is_rotated(name):
            values = _halves_from_pairs(values, self._head_size())
        # What is not quantized is still the file's map, which must not be touched after close.
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    @override
    def form(self, name: str) -> WeightForm:
        shape = self.shape(name)
        type_name = self.entries[self.stored_name(name)].type_name
        return _FORMS.get(type_name, WeightForm.PLAIN) if len(shape) > 1 else WeightForm.PLAIN

    @override
    def read_blocks(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        form = self.form(name)
        data = np.asarray(self._tensors[self.stored_name(name)].data)
        blocks = data if rows is None else data[rows.start : rows.stop]
        if columns is not None:
            blocks = blocks[:, form.row_bytes(columns.start) : form.row_bytes(columns.stop)]
        if self._pairwise and _is_rotated(name):
            blocks = _halves_from_pairs(blocks, self._head_size())
        # Not the file's map itself, which must not be touched after close.
        return torch.from_numpy(np.array(blocks))

    @override
    def check_type(self, name: str) -> None:
        # Nothing else tells what can be dequantized but to do it; the rows of one head do.
        rows = min(self.shape(name)[0], self._head_size())
        self.read(name, rows=range(rows))

    @override
    def close(self) -> None:
        self._tensors.clear()

    @cached_property
    def _name_map(self) -> gguf.TensorNameMap:
        architecture = self.fields.text("model_type")
        found = [model for model, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
        if not found:
            raise ModelError(
                f"{self.path}: architecture {architecture!r} is none that GGUF files have; "
                "convert the model again"
            )
        return gguf.get_tensor_name_map(found[0], self.fields.integer("num_hidden_layers"))

    def _head_size(self) -> int:
        heads = self.fields.integer("num_attention_heads")
        return self.fields.integer("head_dim", self.fields.integer("hidden_size") // heads)

    def _rope_divisors(self) -> list[float]:
        tensor = self._tensors.get("rope_freqs.weight")
        if tensor is None:
            return []
        return [float(each) for each in _dequantize(np.asarray(tensor.data), tensor.tensor_type)]


def _dequantize(
    data: npt.NDArray[Any], kind: gguf.GGMLQuantizationType, columns: range | None = None
) -> npt.NDArray[np.float32]:
    """data [rows, bytes] or floats -> [rows, columns]; plain float32 is returned as it is.

    gguf works on 16 rows at a time. Rows are whole quantization blocks, so several are joined to
    one long row first: half the time for a model with short rows.
    """
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    first = 0
    if columns is not None:
        first = columns.start // block_columns
        items = block_bytes // data.itemsize
        data = data[:, first * items : -(-columns.stop // block_columns) * items]
    rows = data.shape[0] if data.ndim > 1 else 1
    rows_joined = next(joined for joined in (8, 4, 2, 1) if rows % joined == 0)
    if rows_joined > 1:
        data = data.reshape(rows // rows_joined, -1)
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(data, kind)
    if rows_joined > 1:
        values = values.reshape(rows, -1)
    if columns is not None:
        start = columns.start - first * block_columns
        values = values[:, start : start + len(columns)]
    return values.astype(np.float32, copy=False)


def _is_rotated(name: str) -> bool:
    return name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias"))


def _halves_from_pairs(values: npt.NDArray[Number], head_size: int) -> npt.NDArray[Number]:
    """Undoes the converter's order of rows within a head: pairs (i, i + d/2) stood side by side."""
    assert values.shape[0] % head_size == 0, "query and key rows are read by whole heads"
    paired = values.reshape(-1, head_size // 2, 2, *values.shape[1:])
    halves: npt.NDArray[Number] = paired.swapaxes(1, 2).reshape(values.shape)
    return halves
