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

CHOICES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        KERNELS: ("auto", "torch", *INSTRUCTIONS),
        COLLECTIVES: ("auto", "shared-memory", "gloo"),
    }
)
"""Of the options that are a choice; the first is the default."""

_KNOWN = (*CHOICES, DEVICE_IDS, COMMUNICATOR_HOST)


def check_options(options: Mapping[str, str]) -> None:
    """Raises BackendUnavailable naming an option there is not, or one that is no choice."""
    refuse_unknown_options("cpu", options, _KNOWN)
    for name, value in options.items():
        if name in CHOICES and value not in CHOICES[name]:
            raise BackendUnavailable(f"{name} is {value!r}; choose {', '.join(CHOICES[name])}")


def chosen(options: Mapping[str, str], name: str) -> str:
    """What an option that is a choice is."""
    return options.get(name, CHOICES[name][0])
