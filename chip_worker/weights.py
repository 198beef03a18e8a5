"""Weights of one rank: pieces read from a checkpoint, put together on the chip in its dtype."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.interface import Device
from chip_worker.checkpoint import Checkpoint
from chip_worker.errors import ModelError
from chip_worker.gguf_checkpoint import GgufCheckpoint
from chip_worker.safetensors_checkpoint import SafetensorsCheckpoint

READ_ELEMENTS_MAX = 1 << 22
"""Numbers read at a time: 16 MiB in float32, whatever the size of the tensor."""


def open_checkpoint(path: str) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face directory. Raises ModelError."""
    if Path(path).is_dir():
        return SafetensorsCheckpoint(path)
    if Path(path).is_file():
        return GgufCheckpoint(path)
    raise ModelError(f"model {path!r}: no such file or directory")


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
    """Reads one rank's tensors; they belong to the caller, `bytes_read` counts them."""

    def __init__(self, checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> None:
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def read(self, pieces: Pieces) -> Any:  # noqa: ANN401 - as the shape says
        """What is made of the pieces, on the chip: a Matrix if they have columns, else a vector.

        Raises ModelError for a missing tensor or a wrong shape, OutOfMemory if the chip is full.
        """
        for piece in pieces:
            self._checkpoint.expect(piece.name, piece.shape)
        shape, device = stacked_shape(pieces), self._device
        if len(shape) == 1:
            vector = device.allocate(shape, self._dtype)
            self.bytes_read += vector.nbytes
            for first, numbers in self._rows(pieces):
                device.copy(numbers, vector[first : first + len(numbers)])
            return vector
        matrix = device.allocate_matrix(shape, self._dtype)
        self.bytes_read += matrix.nbytes
        for first, rows in self._rows(pieces):
            device.write_rows(matrix, first, rows)
        return matrix

    def _rows(self, pieces: Pieces) -> Iterator[tuple[int, torch.Tensor]]:
        """Some after the other, and where they belong: the host needs memory for those only."""
        start = 0
        for piece in pieces:
            stored = 0 if piece.rows is None else piece.rows.start
            for part in _parts(piece):
                rows = range(stored + part.start, stored + part.stop)
                values = self._checkpoint.read(piece.name, rows, piece.columns)
                if piece.offset:
                    values = values.float() + piece.offset
                yield start + part.start, values.to(self._dtype)
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
