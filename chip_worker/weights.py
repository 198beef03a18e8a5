"""Weights of one rank: parts read from a checkpoint, put together on the chip in its dtype."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.interface import Device
from chip_worker.checkpoint import Checkpoint
from chip_worker.errors import ModelError
from chip_worker.gguf_checkpoint import GgufCheckpoint
from chip_worker.safetensors_checkpoint import SafetensorsCheckpoint
from chip_worker.tensor_parallel import ShardPlan


def open_checkpoint(path: str) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face directory. Raises ModelError."""
    if Path(path).is_dir():
        return SafetensorsCheckpoint(path)
    if Path(path).is_file():
        return GgufCheckpoint(path)
    raise ModelError(f"model {path!r}: no such file or directory")


@dataclass(frozen=True)
class RowPart:
    """Some rows of a tensor; `shape` is what the whole tensor must have."""

    name: str
    shape: tuple[int, ...]
    rows: range


class ShardReader:
    """Reads one rank's shard; tensors belong to the caller, `bytes_read` counts them.

    Every method raises ModelError for a missing tensor or a wrong shape, OutOfMemory if the chip is
    full.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: Device, dtype: torch.dtype, shard: ShardPlan
    ) -> None:
        self.config = checkpoint.config
        self.shard = shard
        self.bytes_read = 0
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor every rank holds."""
        self._checkpoint.expect(name, shape)
        target = self._allocate(shape)
        self._fill(target, self._checkpoint.read(name))
        return target

    def rows(self, *parts: RowPart) -> torch.Tensor:
        """The parts below each other in one tensor: [sum of rows, ...]."""
        for part in parts:
            self._checkpoint.expect(part.name, part.shape)
        target = self._allocate((sum(len(part.rows) for part in parts), *parts[0].shape[1:]))
        start = 0
        for part in parts:
            stop = start + len(part.rows)
            self._fill(target[start:stop], self._checkpoint.read(part.name, rows=part.rows))
            start = stop
        return target

    def columns(self, name: str, shape: tuple[int, int], columns: range) -> torch.Tensor:
        """Some columns of a matrix: [shape[0], len(columns)]."""
        self._checkpoint.expect(name, shape)
        target = self._allocate((shape[0], len(columns)))
        self._fill(target, self._checkpoint.read(name, columns=columns))
        return target

    def _allocate(self, shape: Sequence[int]) -> torch.Tensor:
        target = self._device.allocate(shape, self._dtype)
        self.bytes_read += target.numel() * target.element_size()
        return target

    def _fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._device.copy(source.to(self._dtype), target)
