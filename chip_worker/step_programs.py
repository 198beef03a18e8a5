"""The model's pass over few tokens as captured programs, one for each number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from backends.errors import OutOfMemory, UnsupportedOperation
from backends.interface import BoundKV, CapturedProgram, Device, MemoryPool
from chip_worker.models.model import Model
from chip_worker.step_batch import StepBatch

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _StepProgram:
    """A captured pass with what it reads: inputs [2, T] (ids, positions) and bound caches."""

    inputs: torch.Tensor
    caches: tuple[BoundKV, ...]
    program: CapturedProgram
    hidden: list[torch.Tensor]
    """One, what the pass gave last."""


class StepPrograms:
    """Captures the pass over a number of tokens when it first comes, and replays it from then on.

    tokens_max: more tokens in a step are computed operation by operation: then the operations take
    long beside the calls. 0 captures nothing.
    """

    def __init__(self, model: Model, pool: MemoryPool, device: Device, tokens_max: int) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._tokens_max = tokens_max if device.captures_steps else 0
        self._programs: dict[int, _StepProgram] = {}

    def forward(self, batch: StepBatch) -> torch.Tensor | None:
        """The hidden states [T, H], valid until the next call; None if the step is not captured.

        Raises whatever chip and communicator raise.
        """
        tokens = len(batch.ids)
        if tokens > self._tokens_max:
            return None
        if tokens not in self._programs:
            try:
                self._programs[tokens] = self._captured(batch)
            except (OutOfMemory, UnsupportedOperation) as error:
                _log.info("step_programs.none", reason=str(error))
                self._tokens_max = 0
                return None
        found = self._programs[tokens]
        self._device.copy(torch.from_numpy(np.stack((batch.ids, batch.positions))), found.inputs)
        for cache, rows in zip(found.caches, batch.rows, strict=True):
            self._pool.bind_again(cache, rows)
        found.program.replay()
        return found.hidden[0]

    def _captured(self, batch: StepBatch) -> _StepProgram:
        inputs = self._device.allocate((2, len(batch.ids)), torch.int64)
        caches = tuple(self._pool.bind(rows) for rows in batch.rows)
        hidden: list[torch.Tensor] = []
        program = self._device.capture(_pass(self._model, inputs, caches, hidden))
        return _StepProgram(inputs, caches, program, hidden)

    def end(self) -> None:
        """Drops the programs, which refer to keys and values."""
        self._programs.clear()


def _pass(
    model: Model, inputs: torch.Tensor, caches: tuple[BoundKV, ...], hidden: list[torch.Tensor]
) -> Callable[[], None]:
    """What is captured. It refers to no program, so that a program is gone when it is dropped."""

    def compute() -> None:
        hidden[:] = [model.forward(inputs[0], inputs[1], caches)]

    return compute
