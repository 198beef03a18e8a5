"""Messages of one kind that travel as one: packed into a buffer, sent, and copied out again.

    tensors   [a a a] [b b] [c c c c]
                 |  copy   |   |
    buffer    [a a a b b c c c c]  --one operation-->  [A A A B B C C C C]
                                                          |  copy  |    |
    tensors                                        [A A A] [B B] [C C C C]

Every copy goes through the device, in order with its kernels; the sums are those of the messages
apart, since an operation works element by element.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.device import Device
from backends.fusion_plan import TWO_TENSORS, Operation, PlannedRun
from backends.scratch import Lifetime

ALIGNMENT_BYTES = 512
LAYOUTS_MAX = 256
"""A buffer forgets its views when there are more: shapes change with the rows of a step."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Views of a buffer: what the operation is called with, and each message's part of it.

    sources: where each message's tensor is copied in; empty where this rank brings nothing.
    targets: where each message's result lies; empty where this rank gets nothing.
    """

    tensor: torch.Tensor
    output: torch.Tensor
    sources: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]


class PackBuffer:
    """Chip memory that packed messages go through, with the views of the runs it has carried."""

    def __init__(self, device: Device, buffer_bytes: int) -> None:
        self._memory = device.scratch.take(
            Lifetime.MODEL, "fused_messages", (buffer_bytes,), torch.uint8
        )
        self._layouts: dict[PlannedRun, PackedLayout] = {}

    def layout(self, planned: PlannedRun, rank: int) -> PackedLayout:
        """The views for a run on this rank; its messages fit the buffer."""
        found = self._layouts.get(planned)
        if found is None:
            if len(self._layouts) >= LAYOUTS_MAX:
                self._layouts.clear()
            found = self._layouts[planned] = _lay_out(self._memory, planned, rank)
        return found


def _lay_out(memory: torch.Tensor, planned: PlannedRun, rank: int) -> PackedLayout:
    operation = planned.operation
    inputs = [shape.tensor for shape in planned.shapes]
    packed, sources = _pack(memory, planned.dtype, inputs, operation is Operation.REDUCE_SCATTER)
    if operation in TWO_TENSORS:
        outputs = [shape.output for shape in planned.shapes]
        behind = memory[-(-packed.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
        output, targets = _pack(behind, planned.dtype, outputs, operation is Operation.ALL_GATHER)
        return PackedLayout(packed, output, sources, targets)
    is_root = operation is Operation.BROADCAST and planned.rank == rank
    brings = operation in (Operation.ALL_REDUCE, Operation.SEND) or is_root
    gets = operation is not Operation.SEND and not is_root
    return PackedLayout(packed, packed, sources if brings else (), sources if gets else ())


def _pack(
    memory: torch.Tensor, dtype: torch.dtype, shapes: Sequence[torch.Size], by_rank: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Tensors beside each other at the start of `memory`, as one and as views of it.

    by_rank: the first axis is the rank; then each rank's parts are beside each other.
    """
    counts = [math.prod(shape[1:] if by_rank else shape) for shape in shapes]
    whole = (shapes[0][0], sum(counts)) if by_rank else (sum(counts),)
    packed = memory[: math.prod(whole) * dtype.itemsize].view(dtype).view(whole)
    parts = packed.split_with_sizes(counts, dim=-1)
    return packed, tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
