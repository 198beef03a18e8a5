"""Scripted faults of simulated chips, parsed from text such as "chip3:error@launch=120".

    script  = fault {"," fault}
    fault   = ["chip" N ":"] kind "@" point ["=" N] [":x" FACTOR]

Counts begin at 1 and are per chip. A chip counts its own launches, copies, collectives and
allocations; the stages of starting (`open`, `probe_collective`, `load`) happen once.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from backends.errors import BackendUnavailable

COUNTED_POINTS = ("launch", "copy", "collective", "allocate")
STAGES = ("open", "probe_collective", "load")
GRAMMAR = (
    "faults are written [chipN:]KIND@POINT, joined by commas: "
    "error|hang|death@launch|copy|collective=N, slow@launch=N:xFACTOR (from the N-th on), "
    "oom@allocate=N, leak@OPERATION, wrong@OPERATION[=N], "
    "fail|hang|death@open|probe_collective|load"
)

_FAULT = re.compile(
    r"(?:chip(?P<chip>\d+):)?(?P<kind>[a-z]+)@(?P<point>[a-z_]+)"
    r"(?:=(?P<count>[1-9]\d*))?(?::x(?P<factor>\d+(?:\.\d+)?))?"
)
_WORK = ("launch", "copy", "collective")
_COUNTED = {
    "error": _WORK,
    "hang": _WORK,
    "death": _WORK,
    "slow": ("launch",),
    "oom": ("allocate",),
}
_AT_STAGES = ("fail", "hang", "death")
_AT_OPERATIONS = ("leak", "wrong")


@dataclass(frozen=True)
class Fault:
    """One fault; chip None is every chip, count 0 every time."""

    kind: str
    point: str
    count: int = 0
    factor: float = 1.0
    chip: int | None = None


def parse_faults(script: str) -> tuple[Fault, ...]:
    """The faults of a script; empty text has none. Raises BackendUnavailable with the grammar."""
    return tuple(_parse(text.strip()) for text in script.split(",")) if script.strip() else ()


def _parse(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        _refuse(text)
    kind, point = match["kind"], match["point"]
    count, factor = int(match["count"] or 0), match["factor"]
    counted = point in _COUNTED.get(kind, ()) and count > 0
    staged = kind in _AT_STAGES and point in STAGES and not count
    named = kind in _AT_OPERATIONS and point not in (*COUNTED_POINTS, *STAGES)
    if not (counted or staged or named) or (kind == "slow") != (factor is not None):
        _refuse(text)
    if kind == "leak" and count:
        _refuse(text)
    chip = None if match["chip"] is None else int(match["chip"])
    return Fault(kind, point, count, float(factor or 1), chip)


def _refuse(text: str) -> NoReturn:
    raise BackendUnavailable(f"fault {text!r} cannot be read; {GRAMMAR}")


class ChipFaults:
    """The faults of one chip, and how far the chip has come towards them."""

    def __init__(self, faults: tuple[Fault, ...] = (), chip: int = 0) -> None:
        self._faults = tuple(fault for fault in faults if fault.chip in (None, chip))
        self._counts: dict[str, int] = {}

    def count(self, point: str) -> str | None:
        """Counts one more of a counted point; the kind of fault that strikes at it, if any."""
        reached = self._counted(point)
        for fault in self._faults:
            if fault.point == point and fault.kind != "slow" and fault.count == reached:
                return fault.kind
        return None

    def at_stage(self, stage: str) -> str | None:
        """The kind of fault that strikes at a stage of starting, if any."""
        for fault in self._faults:
            if fault.point == stage:
                return fault.kind
        return None

    def slowness(self) -> float:
        """What the seconds of the launch just counted are multiplied by."""
        launches = self._counts.get("launch", 0)
        factor = 1.0
        for fault in self._faults:
            if fault.kind == "slow" and launches >= fault.count:
                factor *= fault.factor
        return factor

    def leaks(self, operation: str) -> bool:
        """Whether the operation keeps a hidden buffer per shape."""
        return any(fault.kind == "leak" and fault.point == operation for fault in self._faults)

    def is_wrong(self, operation: str) -> bool:
        """Whether this call of the operation, which counts, gives a wrong result."""
        wrong = [
            fault for fault in self._faults if fault.kind == "wrong" and fault.point == operation
        ]
        if not wrong:
            return False
        reached = self._counted(operation)
        return any(fault.count in (0, reached) for fault in wrong)

    def _counted(self, point: str) -> int:
        self._counts[point] = self._counts.get(point, 0) + 1
        return self._counts[point]
