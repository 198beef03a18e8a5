"""What the kernels of a simulated chip refuse, and what they get silently wrong."""

from collections.abc import Iterable

import torch

from backends.errors import DeviceError
from backends.simulator.profile import Profile


class KernelRejected(DeviceError):
    """A kernel does not take these arguments; the chip goes on working."""


def check_arguments(
    profile: Profile,
    operation: str,
    tensors: Iterable[torch.Tensor],
    *,
    indices: Iterable[torch.Tensor] = (),
    decode_rows: int = 0,
) -> None:
    """Raises KernelRejected as the chip's kernels would.

    tensors: the ordinary arguments, not a KV arena, whose layout is the kernel's own business.
    indices: those that hold positions, ids or tables. decode_rows: rows of decode attention.
    """
    for tensor in indices:
        if profile.int32_indices_only.value and tensor.dtype == torch.int64:
            _reject(profile, operation, "expected Int but found Long; convert indices to int32")
    limit = profile.decode_rows_max.value
    if limit is not None and decode_rows > limit:
        _reject(profile, operation, f"{decode_rows} rows of at most {limit}; split the batch")
    for tensor in tensors:
        _check_tensor(profile, operation, tensor)


def _check_tensor(profile: Profile, operation: str, tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.float64 and not profile.has_float64.value:
        _reject(profile, operation, f"no float64, got {shape}; use float32")
    if not profile.contiguous_only.value:
        return
    if not tensor.is_contiguous():
        strides = tensor.stride()
        _reject(profile, operation, f"{shape} of strides {strides} is not contiguous; copy it")
    row_bytes = (shape[-1] if shape else 1) * tensor.element_size()
    if len(shape) > 1 and row_bytes % profile.alignment_bytes.value:
        _reject(
            profile,
            operation,
            f"the last dimension of {shape} takes {row_bytes} bytes, which is not a multiple of "
            f"{profile.alignment_bytes.value}; pad it",
        )


def _reject(profile: Profile, operation: str, why: str) -> None:
    raise KernelRejected(f"{profile.name} rejects {operation}: {why}")


def gets_wrong(profile: Profile, rows: int) -> bool:
    """Whether a kernel over so many rows is silently wrong."""
    first = profile.wrong_result_rows_min.value
    return first is not None and rows >= first


def spoil(tensor: torch.Tensor) -> None:
    """Makes a result wrong but plausible: right dtype, finite, another order."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.dtype.is_floating_point:
        tensor.neg_().add_(1)
    else:
        tensor.bitwise_xor_(1)


def spoiled(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is wrong but plausible."""
    copied = tensor.clone()
    spoil(copied)
    return copied
