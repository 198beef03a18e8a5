"""What the machine gives at the moment a run begins, for results are to be read beside it.

The same cores may be several times as far from each other, and their memory half as fast, a second
later: a virtual machine is moved about by its host.
"""

import ctypes
from dataclasses import dataclass

from kernels.library import LibraryUnusable, open_library


@dataclass(frozen=True)
class MachineProbe:
    """barrier_ns: how long two cores take to wait for each other; None with one
    core, and where they were never free together.

    read_one_gb_per_s, read_every_gb_per_s: memory that one core reads, and all together.
    """

    barrier_ns: float | None
    read_one_gb_per_s: float
    read_every_gb_per_s: float


class _Probe(ctypes.Structure):
    """Probe in kernels/cpu/probe.h."""

    _fields_ = (
        ("barrier_ns", ctypes.c_double),
        ("read_one_per_s", ctypes.c_double),
        ("read_every_per_s", ctypes.c_double),
    )


def probe_machine() -> MachineProbe | None:
    """Takes the cores and 256 MiB of memory for about a second; None without native kernels."""
    try:
        probe = open_library().polychip_probe_machine
    except LibraryUnusable:
        return None
    probe.restype, probe.argtypes = ctypes.c_bool, (ctypes.POINTER(_Probe),)
    found = _Probe()
    if not probe(ctypes.byref(found)):
        return None
    return MachineProbe(
        found.barrier_ns or None, found.read_one_per_s / 1e9, found.read_every_per_s / 1e9
    )
