"""Times of steps on one chip: as the service runs them, and operation by operation.

The same loads run on two sessions in turn: one that captures its steps, and one that computes every
operation by a call of its own, whose calls are timed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

OTHER = "other"
"""What neither an operation nor a collective takes."""


WARM_UP_STEPS = 2
"""Of each load, not counted: the first of a load is captured."""


FILL_TOKENS = 512
"""Chunks that bring rows to their context are no larger."""


class StepFailed(Exception):
    """A step could not be computed; the message says why."""


class Load(NamedTuple):
    """What a step computes: `rows` decode, and the first `chunk_tokens` of one more prompt."""

    rows: int
    chunk_tokens: int = 0

    @property
    def text(self) -> str:
        """For people."""
        rows = f"{self.rows} row{'s' * (self.rows != 1)}" if self.rows else ""
        chunk = f"chunk of {self.chunk_tokens}" if self.chunk_tokens else ""
        return " + ".join(filter(None, (rows, chunk)))


@dataclass(frozen=True)
class Extent:
    """What is measured. context: tokens of a row before its first step. repeats: of each load."""

    loads: Sequence[Load]
    context: int
    repeats: int

    @property
    def rows_max(self) -> int:
        """Most rows of a load."""
        return max(load.rows for load in self.loads)

    @property
    def chunk_tokens_max(self) -> int:
        """Largest chunk, those that bring the rows to their context among them."""
        return max(min(self.context, FILL_TOKENS), *(load.chunk_tokens for load in self.loads))

    @property
    def tokens_max(self) -> int:
        """Most tokens of a slot: every step with rows makes them longer."""
        return max(
            self.context + (self.repeats + WARM_UP_STEPS) * len(self.loads) + 1,
            self.chunk_tokens_max + 1,
        )


@dataclass(frozen=True)
class StepCost:
    """Medians of one load, in seconds.

    step_s: a step as the service runs it. computed_s: one whose operations are called one by one.
    operation_s: of that the time of each operation, and of what is none as OTHER.
    calls: how many calls that step makes.
    """

    load: Load
    step_s: float
    computed_s: float
    operation_s: Mapping[str, float]
    calls: int


@dataclass(frozen=True)
class Costs:
    """chip: what was measured, for people. weight_bytes: of the model's weights, all of which a
    step reads. read_per_s: bytes the machine's cores read of memory, as probed before; None if
    unknown."""

    extent: Extent
    chip: Mapping[str, str]
    steps: Sequence[StepCost]
    weight_bytes: int
    read_per_s: float | None


class TimedCall(Protocol):
    """A call as `backends.debug` tells of it, which needs torch to be imported."""

    name: str
    duration_ns: int | None


class Calls:
    """Nanoseconds that the calls of a step took, as they are told."""

    def __init__(self) -> None:
        self.taken_ns: Counter[str] = Counter()
        self.count = 0

    def take(self, call: TimedCall) -> None:
        """Counts one call."""
        self.taken_ns[call.name] += call.duration_ns or 0
        self.count += 1

    def clear(self) -> None:
        """Forgets them."""
        self.taken_ns = Counter()
        self.count = 0


class Chip(Protocol):
    """A chip that is stepped."""

    def run(self, load: Load) -> float:
        """Seconds of one step of this load. Raises StepFailed."""


def measure_load(load: Load, repeats: int, chip: Chip, timed_chip: Chip, calls: Calls) -> StepCost:
    """The two chips take turns; `calls` are those of `timed_chip`. Raises StepFailed."""
    for _ in range(WARM_UP_STEPS):
        chip.run(load)
        timed_chip.run(load)
    steps_s, computed_s, by_operation = [], [], []
    for _ in range(repeats):
        steps_s.append(chip.run(load))
        calls.clear()
        computed_s.append(timed_chip.run(load))
        by_operation.append(calls.taken_ns)
    names = dict.fromkeys(name for taken_ns in by_operation for name in taken_ns)
    operation_s = {name: median(each[name] for each in by_operation) / 1e9 for name in names}
    whole_s = median(computed_s)
    operation_s[OTHER] = max(0.0, whole_s - sum(operation_s.values()))
    return StepCost(load, median(steps_s), whole_s, operation_s, calls.count)
