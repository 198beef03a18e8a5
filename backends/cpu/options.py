"""The options of the cpu backend: which there are, and what each may be."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from backends.errors import BackendUnavailable
from backends.plugin import COMMUNICATOR_HOST, refuse_unknown_options

INSTRUCTIONS = ("portable", "avx2", "avx512", "amx")
"""Instructions in kernels/cpu/instructions.h, each including those before it."""

KERNELS = "kernels"
COLLECTIVES = "collectives"
DEVICE_IDS = "device-ids"
CHIPS_PER_CORE = "chips-per-core"
CHIPS_PER_CORE_MAX = 8
"""Unless the option says otherwise; as many processes wait for each core."""

CHOICES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        KERNELS: ("auto", "torch", *INSTRUCTIONS),
        COLLECTIVES: ("auto", "shared-memory", "gloo"),
    }
)
"""Of the options that are a choice; the first is the default."""

_KNOWN = (*CHOICES, DEVICE_IDS, CHIPS_PER_CORE, COMMUNICATOR_HOST)


def check_options(options: Mapping[str, str]) -> None:
    """Raises BackendUnavailable naming an option there is not, or what an option cannot be."""
    refuse_unknown_options("cpu", options, _KNOWN)
    for name, value in options.items():
        if name in CHOICES and value not in CHOICES[name]:
            raise BackendUnavailable(f"{name} is {value!r}; choose {', '.join(CHOICES[name])}")
    chips_per_core_max(options)


def chips_per_core_max(options: Mapping[str, str]) -> int:
    """Most chips of a core that a service may have. Raises BackendUnavailable."""
    text = options.get(CHIPS_PER_CORE, str(CHIPS_PER_CORE_MAX))
    if not (text.isdecimal() and int(text) > 0):
        raise BackendUnavailable(f"{CHIPS_PER_CORE} is {text!r}; give a number from 1 on")
    return int(text)


def chosen(options: Mapping[str, str], name: str) -> str:
    """What an option that is a choice is."""
    return options.get(name, CHOICES[name][0])
