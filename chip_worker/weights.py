"""Weights of one rank: pieces read from a checkpoint, put together on the chip as it holds them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.interface import Device, WeightForm
from chip_worker.checkpoint import Checkpoint
from chip_worker.errors import ModelError
from chip_worker.gguf_checkpoint import GgufCheckpoint
from chip_worker.representable_weights import check_blocks, check_rounded
from chip_worker.safetensors_checkpoint import SafetensorsCheckpoint

READ_ELEMENTS_MAX = 1 << 22
"""Numbers read at a time: 16 MiB in float32, whatever the size of the tensor."""


def open_checkpoint(path: str) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face directory. Raises ModelError."""
    if Path(path).is_dir():
        return SafetensorsCheckpoint(path)
    if Path(path).is_file():
        return GgufCheckpoint(path)
    exists = Path(path).exists()
    what = "it is neither a file nor a directory" if exists else "no such file or directory"
    raise ModelError(f"model {path!r}: {what}")


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a stored tensor: all of it, some rows, or some columns.

    shape: of the whole tensor. grain: rows that must be read together, such as those of a head.
    offset: added to every number.
    """

    name: str
    shape: tuple[int, ...]
    rows: range | None = None
    columns: range | None = None
    grain: int = 1
    offset: float = 0.0

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds."""
        first, *rest = self.shape
        held = first if self.rows is None else len(self.rows)
        return (held, *(rest if self.columns is None else [len(self.columns)]))


Pieces = tuple[Piece, ...]
"""Of one tensor on the chip, below each other."""


def stacked_shape(pieces: Pieces) -> tuple[int, ...]:
    """Shape of the tensor made of the pieces."""
    return (sum(piece.held_shape[0] for piece in pieces), *pieces[0].held_shape[1:])


class ShardReader:
    """Reads one rank's tensors; they belong to the caller, `bytes_read` counts them.

    weights: "bf16": matrices are plain, in `dtype`; "int8": of the form Q8_0; "native": of their
    form in the checkpoint, where all of a matrix has one that the chip knows, else plain. forms: of
    the matrices read so far. cut: names of those that are plain because this rank's columns begin
    or end within a block.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: Device, dtype: torch.dtype, weights: str = "bf16"
    ) -> None:
        self.bytes_read = 0
        self.forms: Counter[WeightForm] = Counter()
        self.cut: set[str] = set()
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._weights = weights

    def bytes_of(self, pieces: Pieces) -> int:
        """What `read` will take of the chip. Raises ModelError for a missing tensor."""
        shape = stacked_shape(pieces)
        if len(shape) == 1:
            return shape[0] * self._dtype.itemsize
        return self._device.matrix_bytes(shape, self._dtype, self._form(pieces))

    def read(self, pieces: Pieces) -> Any:  # noqa: ANN401 - as the shape says
        """What is made of the pieces, on the chip: a Matrix if they have columns, else a vector.

        Raises ModelError for a missing tensor, a wrong shape, or weights that the form cannot stand
        for; OutOfMemory if the chip is full.
        """
        for piece in pieces:
            self._checkpoint.expect(piece.name, piece.shape)
        shape, device = stacked_shape(pieces), self._device
        if len(shape) == 1:
            vector = device.allocate(shape, self._dtype)
            self.bytes_read += vector.nbytes
            for first, piece, rows in _places(pieces):
                numbers = self._numbers(piece, rows)
                device.copy(numbers.to(self._dtype), vector[first : first + len(numbers)])
            return vector
        form = self._form(pieces)
        matrix = device.allocate_matrix(shape, self._dtype, form)
        self.bytes_read += matrix.nbytes
        self.forms[form] += 1
        for first, piece, rows in _places(pieces):
            named = f"{self._checkpoint.path}: tensor {piece.name}"
            if self._writes_blocks(piece, form):
                stored = self._checkpoint.form(piece.name)
                blocks = self._checkpoint.read_blocks(piece.name, rows, piece.columns)
                check_blocks(named, blocks, stored)
                device.write_blocks(matrix, first, blocks, stored)
                continue
            numbers = self._numbers(piece, rows)
            if form is WeightForm.PLAIN:
                numbers = numbers.to(self._dtype)
            else:
                # What is to be rounded to 8 bits is not rounded twice.
                check_rounded(named, numbers)
            device.write_rows(matrix, first, numbers)
        return matrix

    def _writes_blocks(self, piece: Piece, form: WeightForm) -> bool:
        """Whether the chip takes the file's blocks for a matrix of `form`: the quicker way."""
        stored = self._checkpoint.form(piece.name)
        if form is not WeightForm.PLAIN:
            return self._weights == "native"
        return (
            stored is not WeightForm.PLAIN
            and stored in self._device.weight_forms
            and not piece.offset
            and _has_whole_blocks((piece,), stored)
        )

    def _form(self, pieces: Pieces) -> WeightForm:
        """How a matrix is held."""
        if self._weights == "int8":
            return WeightForm.Q8_0
        if self._weights != "native" or any(piece.offset for piece in pieces):
            return WeightForm.PLAIN
        first, *others = {self._checkpoint.form(piece.name) for piece in pieces}
        if others or first not in self._device.weight_forms:
            return WeightForm.PLAIN
        if not _has_whole_blocks(pieces, first):
            self.cut.add(pieces[0].name)
            return WeightForm.PLAIN
        return first

    def _numbers(self, piece: Piece, rows: range) -> torch.Tensor:
        values = self._checkpoint.read(piece.name, rows, piece.columns)
        return values.float() + piece.offset if piece.offset else values


def _has_whole_blocks(pieces: Pieces, form: WeightForm) -> bool:
    """Whether the columns of all pieces begin and end with blocks."""
    cuts = [piece.columns for piece in pieces if piece.columns is not None]
    return not any(edge % form.block_columns for cut in cuts for edge in (cut.start, cut.stop))


def _places(pieces: Pieces) -> Iterator[tuple[int, Piece, range]]:
    """Rows of the pieces in parts to read at a time, each with its first row in what is made."""
    start = 0
    for piece in pieces:
        stored = 0 if piece.rows is None else piece.rows.start
        for part in _parts(piece):
            yield start + part.start, piece, range(stored + part.start, stored + part.stop)
        start += piece.held_shape[0]


def _parts(piece: Piece) -> Iterator[range]:
    rows, *columns = piece.held_shape
    # What is read, not what is held: columns may be cut from whole rows.
    row_elements = piece.shape[1] if columns else 1
    # Also in the 16s that the gguf package converts at a time.
    grain = math.lcm(piece.grain, 16)
    step = max(1, READ_ELEMENTS_MAX // (row_elements * grain)) * grain
    for start in range(0, rows, step):
        yield range(start, min(rows, start + step))
