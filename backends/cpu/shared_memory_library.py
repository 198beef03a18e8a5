"""The native collectives as ctypes sees them: what backends/cpu/native exports, built by setup.

ctypes gives up Python's lock for the time of a call, so a rank that waits stops no other thread.
"""

import ctypes
from enum import IntEnum
from pathlib import Path

import torch

from backends.errors import BackendUnavailable

LIBRARY_PATH = Path(__file__).parent / "native" / "build" / "libpolychip_collectives.so"
LAYOUT_VERSION = 3
"""The layout this module was written for; kLayoutVersion in native/layout.h."""

RANKS_MAX = 64
"""kRanksMax in native/layout.h."""

BUFFERS = 8
"""Numbered buffers of a rank; kDepth in native/layout.h."""

LINE_BYTES = 64


class Kind(IntEnum):
    """Kind in native/operation.h."""

    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    SEND = 5
    RECEIVE = 6


class Status(IntEnum):
    """Status in native/communicator.h."""

    PENDING = 0
    DONE = 1
    FAILED = 2
    INTERRUPTED = 3


class FailureKind(IntEnum):
    """FailureKind in native/communicator.h."""

    NONE = 0
    PEER_LOST = 1
    TIMEOUT = 2
    MISUSE = 3
    ABORTED = 4
    CLOSED = 5


SUM_NONE = 0

SUM_TYPES = {
    torch.float32: 1,
    # A complex number is added as two real ones.
    torch.complex64: 1,
    torch.float64: 2,
    torch.complex128: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int8: 5,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
"""SumType in native/sums.h, by dtype; others cannot be summed."""


def operation_code(kind: Kind, sum_type: int, peer: int, dtype_tag: int) -> int:
    """What is the same from call to call, in one number; Request in native/operation.h."""
    return kind | sum_type << 8 | (peer + 1) << 16 | dtype_tag << 32


class Geometry(ctypes.Structure):
    """Sizes all ranks agree on; Geometry in native/layout.h."""

    _fields_ = (
        ("world_size", ctypes.c_uint32),
        ("layout_version", ctypes.c_uint32),
        ("buffer_bytes", ctypes.c_uint64),
        ("ring_bytes", ctypes.c_uint64),
    )


class Timing(ctypes.Structure):
    """How long is waited for what; Timing in native/communicator.h."""

    _fields_ = (
        ("deadline_ns", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("beat_ns", ctypes.c_int64),
        ("still_beats", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


class RepeatedCall(ctypes.Structure):
    """A collective as a captured program calls it; RepeatedCall in native/api.cpp."""

    _fields_ = (
        ("communicator", ctypes.c_void_p),
        ("code", ctypes.c_uint64),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
    )


_POINTER, _RANK, _NUMBER = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64
_WORD = ctypes.c_uint32

# By the name in native/api.cpp, without the prefix: what is returned, what is given.
_FUNCTIONS = {
    "layout_version": (_WORD, ()),
    "segment_bytes": (ctypes.c_uint64, (_POINTER,)),
    "open": (_POINTER, (_POINTER, _POINTER, _POINTER, _RANK, ctypes.c_bool)),
    "join": (None, (_POINTER, ctypes.c_uint64)),
    "nonce": (ctypes.c_uint64, (_POINTER, _RANK)),
    "start": (ctypes.c_bool, (_POINTER,)),
    "submit": (_NUMBER, (_POINTER, ctypes.c_uint64, _POINTER, _POINTER, ctypes.c_uint64)),
    "submit_sums": (
        _NUMBER,
        (_POINTER, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64),
    ),
    "poll": (ctypes.c_int32, (_POINTER, _NUMBER)),
    "wait": (ctypes.c_int32, (_POINTER, _NUMBER, ctypes.c_int64)),
    "call": (ctypes.c_int32, (_POINTER,)),
    "called_ns": (_POINTER, (_POINTER,)),
    "oldest": (_POINTER, (_POINTER,)),
    "failure": (_WORD, (_POINTER, ctypes.c_char_p, ctypes.c_uint64)),
    "abort": (None, (_POINTER,)),
    "leave": (None, (_POINTER,)),
    "free": (None, (_POINTER,)),
}


class Library:
    """The functions of native/api.cpp, each an attribute by its name without the prefix."""

    def __init__(self, path: Path = LIBRARY_PATH) -> None:
        """Raises BackendUnavailable if it was not built, or from other sources."""
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailable(
                f"the native collectives cannot be loaded ({error}); install cmake and a C++ "
                "compiler and run scripts/setup"
            ) from error
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"polychip_{name}")
            function.restype, function.argtypes = result, arguments
        if loaded.polychip_layout_version() != LAYOUT_VERSION:
            raise BackendUnavailable(f"{path} is of other sources; run scripts/setup")
        self._segment_bytes = loaded.polychip_segment_bytes
        self.open = loaded.polychip_open
        self.join = loaded.polychip_join
        self.nonce = loaded.polychip_nonce
        self.start = loaded.polychip_start
        self.submit = loaded.polychip_submit
        self.submit_sums = loaded.polychip_submit_sums
        self.poll = loaded.polychip_poll
        self.wait = loaded.polychip_wait
        self.call_address: int = ctypes.cast(loaded.polychip_call, _POINTER).value or 0
        self.called_ns = loaded.polychip_called_ns
        self.oldest = loaded.polychip_oldest
        self.failure = loaded.polychip_failure
        self.abort = loaded.polychip_abort
        self.leave = loaded.polychip_leave
        self.free = loaded.polychip_free

    def segment_bytes_for(self, geometry: Geometry) -> int:
        """Size of the segment of a group."""
        return int(self._segment_bytes(ctypes.byref(geometry)))
