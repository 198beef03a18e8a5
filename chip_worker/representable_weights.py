"""Refuses weights that 8 and 4 bits cannot stand for: they would become others without a word."""

import torch

from backends.interface import WeightForm
from chip_worker.errors import ModelError

ROUNDED_MAX = 127 * 65504.0
"""The largest number of 8 bits times the largest scale, a float16; see WeightForm.Q8_0."""


def check_rounded(tensor: str, numbers: torch.Tensor) -> None:
    """numbers: floats that are to be rounded to Q8_0. Raises ModelError naming the tensor."""
    # Both are NaN if any number is.
    least, most = (float(each) for each in torch.aminmax(numbers))
    if least >= -ROUNDED_MAX and most <= ROUNDED_MAX:
        return
    found = least if not least >= -ROUNDED_MAX else most
    raise ModelError(
        f"{tensor} has a weight of {found:g}; int8 holds those up to {ROUNDED_MAX:g}: get the "
        "checkpoint again, or choose --weights bf16 if it is meant so"
    )


def check_blocks(tensor: str, blocks: torch.Tensor, form: WeightForm) -> None:
    """blocks [n, bytes] uint8, as `Checkpoint.read_blocks` gives them.

    Raises ModelError naming the tensor if a scale or a minimum is no finite number.
    """
    halves = form.block_bytes - form.block_columns * (8 if form is WeightForm.Q8_0 else 4) // 8
    scales = blocks.reshape(-1, form.block_bytes)[:, :halves].contiguous().view(torch.float16)
    if not bool(scales.isfinite().all()):
        raise ModelError(
            f"{tensor} has a block of {form.value} whose scale is NaN or infinite: the file is "
            "broken; get or convert it again"
        )
