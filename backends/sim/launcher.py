"""How the vendor's kernels reach their chip: arguments checked, the time they take, one launch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from backends.simulator.chip import SimulatedChip
from backends.simulator.kernel_rules import check_arguments
from backends.simulator.profile import Labelled, sourced

_FORMULA_PASSES = 8
"""Assumed: about the elementwise operations of the reference's formulas."""


class Launcher:
    """Launches on one chip.

    decode_rows_max: most rows of a call of the decode kernel, None for the profile's limit.
    """

    def __init__(self, chip: SimulatedChip, decode_rows_max: int | None) -> None:
        profile = chip.profile
        if decode_rows_max is not None:
            limit: Labelled[int | None] = sourced(decode_rows_max, "the option decode-rows-max")
            profile = replace(profile, decode_rows_max=limit)
        self.profile = profile
        self._chip = chip
        self._recorded: list[Callable[[], None]] | None = None
        # Whole words in the last dimension are asked for by elementwise kernels alone.
        self._any_width = replace(
            profile, alignment_bytes=sourced(1, "kernels but the elementwise")
        )

    def launch(
        self,
        name: str,
        run: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        caches: Sequence[torch.Tensor] = (),
        indices: Sequence[torch.Tensor] = (),
        whole_words: bool = False,
        decode_rows: int = 0,
        exact_rows: int = 0,
        moved_bytes: int | None = None,
        flops: float = 0.0,
        wrong: Callable[[], None] | None = None,
    ) -> None:
        """Queues `run`. Raises KernelRejected for arguments that the chip's kernels refuse.

        reads, writes: all tensors but the layers of a KV arena, which are `caches`, and those that
        hold positions, ids or tables, which are `indices`. exact_rows: rows of a kernel whose
        results are silently wrong beyond a limit. moved_bytes: None is every byte of reads and
        writes, once. wrong: what a fault script makes of a kernel that writes into caches.
        """
        check_arguments(
            self.profile if whole_words else self._any_width,
            name,
            (*reads, *writes, *indices),
            indices=indices,
            decode_rows=decode_rows,
        )
        if moved_bytes is None:
            moved_bytes = sum(map(size_bytes, (*reads, *writes)))
        self.submit(
            partial(
                self._chip.launch,
                name,
                run,
                reads=(*reads, *indices, *caches),
                writes=writes,
                seconds=self.profile.seconds(moved_bytes=moved_bytes, flops=flops),
                rows=exact_rows,
                wrong=wrong,
            )
        )

    def launch_formula(
        self,
        name: str,
        run: Callable[[], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        moved_bytes: int,
    ) -> None:
        """Queues a formula of plain torch, which takes any tensor and is slow.

        moved_bytes: what one of its many passes through memory moves.
        """
        seconds = self.profile.seconds(moved_bytes=_FORMULA_PASSES * moved_bytes)
        self.submit(
            partial(self._chip.launch, name, run, reads=reads, writes=writes, seconds=seconds)
        )

    def submit(self, launch: Callable[[], None]) -> None:
        """Asks the chip for it or, in a recording, keeps it."""
        if self._recorded is None:
            launch()
        else:
            self._recorded.append(launch)

    @property
    def recording(self) -> bool:
        """Whether launches are kept instead of asked for."""
        return self._recorded is not None

    def record(self, function: Callable[[], None]) -> list[Callable[[], None]]:
        """The launches that `function` makes, none of which is asked for."""
        assert self._recorded is None, "a capture within a capture"
        recorded = self._recorded = []
        try:
            function()
        finally:
            self._recorded = None
        return recorded

    @property
    def decode_rows_max(self) -> int | None:
        """Most rows of a call of the decode kernel."""
        return self.profile.decode_rows_max.value

    @property
    def exact_rows_max(self) -> int | None:
        """Most rows for which the fused elementwise kernel is right."""
        first_wrong = self.profile.wrong_result_rows_min.value
        return None if first_wrong is None else first_wrong - 1

    def whole_words(self, elements: int, dtype: torch.dtype) -> int:
        """So many elements or a few more, which fill whole words of the elementwise kernels."""
        if not self.profile.contiguous_only.value:
            return elements
        multiple = max(1, self.profile.alignment_bytes.value // dtype.itemsize)
        return -(-elements // multiple) * multiple


def pieces(rows: int, rows_max: int | None) -> list[slice]:
    """Rows in runs no longer than a kernel takes."""
    each = rows_max or max(rows, 1)
    return [slice(start, min(rows, start + each)) for start in range(0, rows, each)]


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
