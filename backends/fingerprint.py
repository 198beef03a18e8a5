"""What a rank is about to call, as a few numbers that ranks can compare, and in words."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from typing_extensions import override

_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "message")
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_NO_ROOT = -1


class Fingerprint(NamedTuple):
    """A call; every field must be alike on all ranks. sequence: calls of its kind before it."""

    sequence: int
    operation: int
    dtype: int
    elements_count: int
    root: int

    @classmethod
    def of(
        cls, sequence: int, operation: str, tensor: torch.Tensor, root: int = _NO_ROOT
    ) -> "Fingerprint":
        """operation: a method of a communicator, or "message" for both ends of send and receive."""
        # A dtype that no list here knows is told apart by the bytes of an element only.
        known = tensor.dtype in _DTYPES
        dtype = _DTYPES.index(tensor.dtype) if known else -tensor.element_size()
        return cls(sequence, _OPERATIONS.index(operation), dtype, tensor.numel(), root)

    @override
    def __str__(self) -> str:
        """Such as "call 12, broadcast from rank 0 of 8 elements of int64"."""
        dtype = "an unlisted dtype"
        if self.dtype >= 0:
            dtype = str(_DTYPES[self.dtype]).removeprefix("torch.")
        origin = "" if self.root == _NO_ROOT else f" from rank {self.root}"
        name = _OPERATIONS[self.operation]
        return f"call {self.sequence}, {name}{origin} of {self.elements_count} elements of {dtype}"


FIELDS_COUNT = len(Fingerprint._fields)


def difference(every: Sequence[Fingerprint]) -> str:
    """Who calls what, by rank; ranks that agree are named together."""
    callers: defaultdict[Fingerprint, list[str]] = defaultdict(list)
    for rank, found in enumerate(every):
        callers[found].append(str(rank))
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}: {call}"
        for call, ranks in callers.items()
    )
