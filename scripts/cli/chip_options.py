"""The options of `polychip serve` that say which chips serve and how they are opened.

--groups 2,1                    two groups of --backend
--groups cpu:2,sim:ideal:1      a backend, or a backend and its variant, for each group
--devices 0,1,5                 ids where there is one backend
--devices 'cpu=0,1;sim=5'       ids for each of several
--backend-option NAME=VALUE     for every backend; BACKEND.NAME=VALUE for one
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

CHIPS_MAX = 4096
"""Of one service; each is a process of its own."""


@dataclass(frozen=True)
class ChipGroup:
    """A group as --groups names it; backend: None where it names none."""

    size: int
    backend: str | None = None

    @classmethod
    def parse(cls, text: str) -> "ChipGroup":
        """SIZE, NAME:SIZE or NAME:VARIANT:SIZE."""
        backend, _, size = text.strip().rpartition(":")
        if not (size.isdecimal() and 0 < int(size) <= CHIPS_MAX):
            raise click.BadParameter(
                f"{text.strip()!r} is not a group: write its chips, from 1 to {CHIPS_MAX}, such as "
                "2, or its backend and its chips, such as cpu:2 or sim:ideal:2"
            )
        return cls(int(size), backend or None)


def chip_groups(text: str) -> tuple[ChipGroup, ...]:
    """Groups with commas between them."""
    return tuple(ChipGroup.parse(part) for part in text.split(","))


def backends_called(name: str, backends: Sequence[str]) -> list[str]:
    """Those of the serving backends that a name means: its own, or any variant of it."""
    return [each for each in backends if name in (each, each.partition(":")[0])]


def device_lists(text: str) -> dict[str, tuple[str, ...]]:
    """Ids by the name in front of them; "" where there is none. Raises UsageError."""
    lists: dict[str, tuple[str, ...]] = {}
    for part in text.split(";"):
        name, separator, ids = part.rpartition("=")
        name = name.strip()
        if separator and not name:
            raise click.UsageError(f"--devices: no backend stands before = in {part.strip()!r}")
        if name in lists:
            whose = f"of {name!r} " if name else ""
            raise click.UsageError(f"--devices: the list {whose}is given twice; join them")
        lists[name] = _device_ids(ids)
    if "" in lists and len(lists) > 1:
        raise click.UsageError(
            "--devices: with several backends each list needs its backend, such as 'cpu=0,1;sim=3'"
        )
    return lists


def _device_ids(text: str) -> tuple[str, ...]:
    ids = tuple(part.strip() for part in text.split(","))
    if not all(ids):
        raise click.UsageError(
            f"--devices: {text.strip()!r} has an empty id; write ids as in 0,1,5"
        )
    repeated = next((each for each in ids if ids.count(each) > 1), None)
    if repeated is not None:
        raise click.UsageError(
            f"--devices: device {repeated!r} is listed twice; a chip serves once, so name it once"
        )
    return ids


def devices_by_backend(
    lists: Mapping[str, tuple[str, ...]], chips: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """The lists under the backends that serve; `chips` has the number of chips of each.

    Raises UsageError where a list fits no backend, several, or not the number of chips.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, ids in lists.items():
        backend = _the_backend(name, list(chips))
        if backend in found:
            raise click.UsageError(f"--devices: the list of {backend!r} is given twice; join them")
        if len(ids) != chips[backend]:
            raise click.UsageError(
                f"--devices has {len(ids)} ids for {chips[backend]} chips of {backend!r}; "
                "give one per chip"
            )
        found[backend] = ids
    return found


def _the_backend(name: str, backends: Sequence[str]) -> str:
    served = ", ".join(backends)
    if not name and len(backends) > 1:
        example = ";".join(f"{backend}=0" for backend in backends)
        raise click.UsageError(
            f"--devices: {served} serve, so each list needs its backend, such as '{example}'"
        )
    called = backends_called(name, backends) if name else list(backends)
    if not called:
        raise click.UsageError(f"--devices: no group is of backend {name!r}; there are {served}")
    if len(called) > 1:
        raise click.UsageError(
            f"--devices: {name!r} may be any of {', '.join(called)}; name its variant"
        )
    return called[0]


def options_of(backend: str, texts: Sequence[str]) -> dict[str, str]:
    """What the one backend there is gets of NAME=VALUE texts. Raises UsageError."""
    own = options_by_backend(texts, [backend]).get(backend, ())
    return dict(text.split("=", 1) for text in own)


def options_by_backend(texts: Sequence[str], backends: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """NAME=VALUE texts under each backend they are for. Raises UsageError."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        prefix, dot, own_name = name.partition(".")
        called = backends_called(prefix, backends) if dot else []
        option = f"{own_name}={value}" if called else text
        if not separator or option.startswith("="):
            raise click.UsageError(
                f"--backend-option: {text!r} is neither NAME=VALUE nor BACKEND.NAME=VALUE"
            )
        if dot and not called:
            raise click.UsageError(
                f"--backend-option: no group is of backend {prefix!r}; "
                f"there are {', '.join(backends)}"
            )
        for backend in called or backends:
            found.setdefault(backend, []).append(option)
    return {backend: tuple(options) for backend, options in found.items()}
