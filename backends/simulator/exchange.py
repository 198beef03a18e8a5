"""What a collective between simulated chips does to their bytes, and what it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from backends.simulator.profile import Profile

MESSAGES = ("send", "receive")


@dataclass(frozen=True)
class Call:
    """What one rank asked for: `tensor` is read, `output` written, and they may be the same.

    peer: the other rank of a send or receive. root: of a broadcast.
    """

    operation: str
    tensor: torch.Tensor
    output: torch.Tensor
    root: int = -1
    peer: int = -1

    @property
    def fingerprint(self) -> tuple[str, torch.dtype, int, int]:
        """What must be equal on all ranks of a collective, and at both ends of a message."""
        operation = "message" if self.operation in MESSAGES else self.operation
        return (operation, self.tensor.dtype, self.tensor.numel(), self.root)

    def seconds(self, profile: Profile) -> float:
        """A fixed time, and the larger of what goes in and what comes out over the link."""
        elements = max(self.tensor.numel(), self.output.numel())
        moved = elements * self.tensor.element_size()
        return profile.collective_fixed_s.value + moved / profile.link_bytes_per_s.value


def exchange(calls: Mapping[int, Call], brought: Mapping[int, torch.Tensor]) -> None:
    """Writes every rank's output from what all ranks brought, always in rank order."""
    ranks = sorted(calls)
    operation = calls[ranks[0]].operation
    parts = [brought[rank] for rank in ranks]
    if operation == "all_reduce":
        total = ordered_sum(parts)
        for rank in ranks:
            calls[rank].output.copy_(total)
    elif operation == "all_gather":
        for rank in ranks:
            for place, part in enumerate(parts):
                calls[rank].output[place].copy_(part)
    elif operation == "reduce_scatter":
        for place, rank in enumerate(ranks):
            calls[rank].output.copy_(ordered_sum([part[place] for part in parts]))
    else:
        assert operation == "broadcast", operation
        for rank in ranks:
            calls[rank].output.copy_(brought[calls[rank].root])


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, floats in at least float32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
