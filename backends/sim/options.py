"""What the command line may set of the simulated chips, parsed and checked before torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from backends.errors import BackendUnavailable
from backends.plugin import COMMUNICATOR_HOST, refuse_unknown_options

Execution = Literal["latest", "earliest", "random"]
EXECUTIONS: tuple[Execution, ...] = ("latest", "earliest", "random")
Choice = TypeVar("Choice", bound=str)

CHIPS_DEFAULT = 8
CHIPS_MAX = 1024


@dataclass(frozen=True)
class SimOptions:
    """The options of the sim backend; None is the profile's own value, or none.

    chips: how many the simulated host has. memory_bytes: of each chip. faults: a fault script.
    seed: of whatever is random. execution: when queued work runs, as far as the chip's rules allow.
    pace: whether waiting for a chip takes the wall time that the modelled chip would take.
    decode_rows_max: most rows of one call of the decode kernel.
    """

    chips: int | None = None
    memory_bytes: int | None = None
    faults: str = ""
    seed: int = 0
    execution: Execution = "latest"
    pace: bool = True
    decode_rows_max: int | None = None


def parse_options(options: Mapping[str, str]) -> SimOptions:
    """Raises BackendUnavailable naming the option, its limits and what there is instead."""
    reader = _Reader(options)
    parsed = SimOptions(
        chips=reader.whole("chips", 1, CHIPS_MAX),
        memory_bytes=reader.whole("memory-bytes", 1 << 16, 1 << 50),
        faults=reader.text("faults"),
        seed=reader.whole("seed", 0, (1 << 63) - 1) or 0,
        execution=reader.choice("execution", EXECUTIONS),
        pace=reader.choice("pace", ("on", "off")) == "on",
        decode_rows_max=reader.whole("decode-rows-max", 1, 1 << 20),
    )
    reader.refuse_the_rest()
    return parsed


class _Reader:
    """Takes options one by one and knows afterwards which nobody took."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._known: list[str] = []

    def text(self, name: str) -> str:
        self._known.append(name)
        return self._options.get(name, "")

    def whole(self, name: str, least: int, most: int) -> int | None:
        text = self.text(name)
        if not text:
            return None
        if not text.isdecimal() or not least <= int(text) <= most:
            raise BackendUnavailable(
                f"option {name} is {text!r}; it must be a whole number from {least} to {most}"
            )
        return int(text)

    def choice(self, name: str, choices: Sequence[Choice]) -> Choice:
        """One of the choices, the first if nothing was said."""
        text = self.text(name) or choices[0]
        for choice in choices:
            if choice == text:
                return choice
        raise BackendUnavailable(f"option {name} is {text!r}; choose {', '.join(choices)}")

    def refuse_the_rest(self) -> None:
        known = sorted([*self._known, COMMUNICATOR_HOST])
        refuse_unknown_options("sim", self._options, known)
