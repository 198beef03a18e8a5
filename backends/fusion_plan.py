"""Which messages of a group travel as one: decided from what is called, and from nothing else.

    all_reduce a    small   ─┐
    all_reduce b    small   ─┴─▶  one run          neighbours of one kind
    all_gather c    small   ───▶  a run
    all_reduce d    large   ───▶  a run
    send e to 1     small   ─┐
    receive f of 1  small   ─┼─▶  a run            between two ranks: neighbours on their own way,
    send g to 1     small   ─┴─▶  one run, e + g   whatever the two say to others meanwhile

All ranks see the same collectives, and both ends of a way the same messages, so all plan alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch


class Operation(Enum):
    """The operations of a communicator, named as its methods are."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    SEND = "send"
    RECEIVE = "receive"

    # By identity: an Enum's own is a call of Python, several times a message.
    __hash__ = object.__hash__


BETWEEN_TWO = frozenset({Operation.SEND, Operation.RECEIVE})
"""Operations only two ranks take part in."""
TWO_TENSORS = frozenset({Operation.ALL_GATHER, Operation.REDUCE_SCATTER})
"""Operations whose result is not where their tensor is."""


class Shape(NamedTuple):
    """All that a plan sees of a call; rank: root or peer, else -1."""

    operation: Operation
    rank: int
    dtype: torch.dtype
    tensor: torch.Size
    output: torch.Size

    @property
    def largest_bytes(self) -> int:
        """Bytes of the larger of its tensors."""
        return max(math.prod(self.tensor), math.prod(self.output)) * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes it takes in a buffer."""
        elements = math.prod(self.tensor)
        if self.operation in TWO_TENSORS:
            elements += math.prod(self.output)
        return elements * self.dtype.itemsize


@dataclass(eq=False)
class PlannedRun:
    """Calls that travel as one, by their positions in the group."""

    operation: Operation
    rank: int
    dtype: torch.dtype
    room_bytes: int
    shapes: list[Shape] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


def plan(shapes: Sequence[Shape], message_bytes_max: int, run_bytes_max: int) -> list[PlannedRun]:
    """Divides the calls of a group into runs, in the order of their first calls."""
    runs: list[PlannedRun] = []
    growing: dict[tuple[Operation, int], PlannedRun] = {}
    for position, shape in enumerate(shapes):
        way = (shape.operation, shape.rank)
        run = growing.get(way)
        large = shape.largest_bytes > message_bytes_max
        fits = run is not None and run.dtype == shape.dtype
        if run is None or not fits or large or shape.packed_bytes > run.room_bytes:
            if shape.operation not in BETWEEN_TWO:
                # Here all ranks are at once: no run goes on across it, whoever takes part in it.
                growing.clear()
            run = PlannedRun(*way, shape.dtype, 0 if large else run_bytes_max)
            growing[way] = run
            runs.append(run)
        run.shapes.append(shape)
        run.positions.append(position)
        run.room_bytes -= shape.packed_bytes
    return runs
