"""Calls a bound operation and the reference with the same numbers, and compares the answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backends.interface import BackendRuntime, KernelTable, Matrix
from backends.probes import ProbeFailed
from chip_worker.step_memory import StepMemory

COSINE_MIN = 0.9999
RELATIVE_ERROR_MAX = 0.01
"""A cosine does not see a wrong scale. One operation in bfloat16 stays below 0.005 of either."""
COMPARED_ROWS = 8
"""Rows of a large batch for which the reference, on one core, is asked."""
_NUMBERS = 65521


@dataclass(frozen=True)
class Operand:
    """Something an operation reads: on the chip, and for the reference on the host in float32."""

    on_chip: Any
    on_host: Any


@dataclass
class NumericCheck:
    """The operations of one rank's chip, and where their operands are placed.

    rows_max: most rows of a step. Every method raises ProbeFailed or what the chip raises.
    """

    runtime: BackendRuntime
    kernels: KernelTable
    memory: StepMemory
    dtype: torch.dtype
    rows_max: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def __post_init__(self) -> None:
        self._normal = torch.randn(_NUMBERS, generator=self.generator).to(self.dtype)
        whole = torch.randint(-127, 128, (_NUMBERS,), generator=self.generator)
        whole[::8] = torch.where(whole[::8] < 0, -127, 127)
        self._eight_bits = whole.to(self.dtype) / 64

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers on the host, exact in the model's dtype."""
        return self._drawn(self._normal, *shape)

    def eight_bits(self, *shape: int) -> torch.Tensor:
        """Numbers that lose nothing where activations are rounded to 8 bits, group by group.

        They are whole steps of the largest of them, which every group holds.
        """
        return self._drawn(self._eight_bits, *shape)

    def _drawn(self, numbers: torch.Tensor, *shape: int) -> torch.Tensor:
        # Drawing each would take as long as the products they are for. No row repeats another: its
        # length does not divide a prime number.
        count = math.prod(shape)
        start = int(torch.randint(_NUMBERS, (1,), generator=self.generator))
        repeats = -(-(start + count) // _NUMBERS)
        if repeats > 1:
            numbers = numbers.repeat(repeats)
        return numbers[start : start + count].view(shape)

    def vector(self, on_chip: torch.Tensor) -> Operand:
        """A norm or a bias with its copy for the reference."""
        return Operand(on_chip, self.to_host(on_chip).float())

    def matrix(self, on_chip: Matrix) -> Operand:
        """A weight with its copy for the reference."""
        return Operand(on_chip, self.matrix_rows(on_chip, range(on_chip.shape[0])))

    def matrix_rows(self, matrix: Matrix, rows: Sequence[int]) -> torch.Tensor:
        """Some rows of it for the reference."""
        return self.memory.device.read_rows(matrix, rows).float()

    def to_host(self, on_chip: torch.Tensor) -> torch.Tensor:
        """A copy that can be read."""
        return self.memory.device.to_host(on_chip)

    def call(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - any operation
        """The chip's answer to host tensors, Operands and plain values; tensors are on the host."""
        placed = [self._placed(operation, argument) for argument in arguments]
        found = self.kernels.dispatch(operation, *placed)
        return tuple(map(self.to_host, found)) if isinstance(found, tuple) else self.to_host(found)

    def rows(self, operation: str, inputs: Sequence[torch.Tensor], *others: Any) -> None:  # noqa: ANN401
        """Compares an operation that treats every row of its first arguments for itself."""
        rows = inputs[0].shape[0]
        found = self.call(operation, *inputs, *others)
        compared = compared_rows(rows)
        expected = self.runtime.fallback(
            operation,
            *(_wide(each[compared]) for each in inputs),
            *(each.on_host if isinstance(each, Operand) else each for each in others),
        )
        pairs = (
            zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        )
        for each, right in pairs:
            self.same_rows(operation, rows, each, right, compared)

    def same_rows(
        self,
        operation: str,
        rows: int,
        found: torch.Tensor,
        expected: torch.Tensor,
        compared: Sequence[int] | None = None,
    ) -> None:
        """found[compared] is what was expected, row by row, and no row of `found` is not finite."""
        if not found.is_floating_point():
            chosen = found if compared is None else found[compared]
            self.same_values(operation, rows, chosen, expected)
            return
        self.finite(operation, rows, found)
        chosen = found if compared is None else found[compared]
        left, right = (each.double().reshape(len(each), -1) for each in (chosen, expected))
        lengths = left.norm(dim=1) * right.norm(dim=1)
        # Rows of zeros have no direction; that they are zeros is seen in the relative error.
        cosines = torch.where(lengths > 0, (left * right).sum(dim=1) / lengths, 1.0)
        errors = (left - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)
        cosine, error = float(cosines.min()), float(errors.max())
        if not (cosine > COSINE_MIN and error < RELATIVE_ERROR_MAX):
            raise self.failed(
                operation,
                rows,
                f"cosine {cosine:.6f} with the reference, must exceed {COSINE_MIN}; relative "
                f"error {error:.2g}, must be below {RELATIVE_ERROR_MAX}",
            )

    def finite(self, operation: str, rows: int, found: torch.Tensor) -> None:
        """No row holds a NaN or an infinity."""
        # Either would show in one of the two; asking every number takes many times as long.
        if not all(math.isfinite(each) for each in found.aminmax()):
            raise self.failed(operation, rows, "its result is not finite")

    def same_values(
        self, operation: str, rows: int, found: torch.Tensor, expected: torch.Tensor
    ) -> None:
        """Every id or flag is what was expected."""
        wrong = int((found != expected).sum())
        if wrong:
            raise self.failed(operation, rows, f"{wrong} of {found.numel()} answers differ")

    def failed(self, operation: str, rows: int, what: str) -> ProbeFailed:
        """The error that says what is wrong, and where."""
        choice = self.kernels.choices[operation]
        return ProbeFailed(
            f"chip {self.memory.device.chip.index} computes {operation!r} (implementation "
            f"{choice.implementation!r}, {self.dtype}) wrongly at batch size {rows}: {what}. It "
            "does not serve: leave this chip out, or run `polychip doctor --conformance`"
        )

    def _placed(self, operation: str, argument: Any) -> Any:  # noqa: ANN401 - any operation
        if isinstance(argument, Operand):
            return argument.on_chip
        if isinstance(argument, torch.Tensor):
            return self.memory.place(operation, argument)
        return argument


def compared_rows(rows: int) -> list[int]:
    """Up to COMPARED_ROWS of a batch, evenly spread, first and last among them."""
    if rows <= COMPARED_ROWS:
        return list(range(rows))
    return [place * (rows - 1) // (COMPARED_ROWS - 1) for place in range(COMPARED_ROWS)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
