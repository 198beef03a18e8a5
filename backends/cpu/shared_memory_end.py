"""One rank's end of a shared segment: the native communicator and the tensors it works on."""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import Struct

import torch

from backends.cpu.shared_memory_library import (
    BUFFERS,
    LAYOUT_VERSION,
    LINE_BYTES,
    FailureKind,
    Geometry,
    Library,
    RepeatedCall,
    Status,
    Timing,
)
from backends.cpu.shared_memory_segment import FOLDER, Segment
from backends.errors import (
    BackendUnavailable,
    CommunicatorError,
    CommunicatorMisuse,
    CommunicatorTimeout,
    PeerLost,
)

_ERRORS: dict[FailureKind, type[CommunicatorError]] = {
    FailureKind.PEER_LOST: PeerLost,
    FailureKind.TIMEOUT: CommunicatorTimeout,
    FailureKind.MISUSE: CommunicatorMisuse,
}
# Status(n) takes half a microsecond.
_STATUSES = tuple(Status)
_REASON_BYTES = 512
_RING_BYTES_MIN = 4 << 10


@lru_cache(maxsize=64)
def _words_packer(count: int) -> Callable[..., bytes]:
    """Packs so many unsigned integers of 64 bits; cheaper than an array made of them."""
    return Struct(f"{count}Q").pack


@dataclass(frozen=True)
class SharedMemorySettings:
    """Sizes and times of a group.

    buffer_bytes: most bytes of a numbered buffer; a rank has eight. buffers_bytes: most bytes of
    all ranks' buffers. ring_bytes, rings_bytes: the same of the rings, one for each ordered pair of
    ranks, at least 4 KiB each. spin_s: a wait this long costs no system call. still_s: a rank
    without a beat for so long is lost. folder: where the segment has its name.
    """

    buffer_bytes: int = 256 << 10
    buffers_bytes: int = 8 << 20
    ring_bytes: int = 256 << 10
    rings_bytes: int = 2 << 20
    spin_s: float = 20e-6
    beat_s: float = 0.05
    still_s: float = 2.0
    folder: Path = FOLDER

    def geometry(self, world_size: int) -> Geometry:
        """The sizes for a group: with two ranks a segment of 4.6 MB, with 64 one of 25 MB."""
        pairs = world_size * (world_size - 1)
        buffer_bytes = min(self.buffer_bytes, self.buffers_bytes // (world_size * BUFFERS))
        ring_bytes = max(_RING_BYTES_MIN, min(self.ring_bytes, self.rings_bytes // pairs))
        part_bytes = LINE_BYTES * world_size
        return Geometry(
            world_size,
            LAYOUT_VERSION,
            max(1, buffer_bytes // part_bytes) * part_bytes,
            ring_bytes // LINE_BYTES * LINE_BYTES,
        )

    def timing(self, deadline_s: float) -> Timing:
        """The times, with the deadline of an operation."""
        return Timing(
            round(deadline_s * 1e9),
            round(self.spin_s * 1e9),
            round(self.beat_s * 1e9),
            max(2, round(self.still_s / self.beat_s)),
        )


class SharedMemoryEnd:
    """Owns the native communicator, and holds tensors until it does not touch them any more.

    It lives for as long as the communicator or one of its works.
    """

    def __init__(
        self, library: Library, segment: Segment, rank: int, geometry: Geometry, timing: Timing
    ) -> None:
        """Raises BackendUnavailable if the segment was made for other sizes."""
        self._pointer: int | None = library.open(
            segment.address, ctypes.byref(geometry), ctypes.byref(timing), rank, rank == 0
        )
        if self._pointer is None:
            raise BackendUnavailable("the segment of rank 0 is laid out for other sizes")
        self._library = library
        self._submit = library.submit
        self._segment = segment
        # Read without a call: asked before and after nearly every operation.
        self._oldest = ctypes.c_uint64.from_address(library.oldest(self._pointer))
        self._called_ns = ctypes.c_int64.from_address(library.called_ns(self._pointer))
        self._held: deque[tuple[int, Sequence[torch.Tensor]]] = deque()

    def __del__(self) -> None:
        # It joins the native thread, so that nothing uses the tensors or the mapping after this.
        if self._pointer is not None:
            self._library.free(self._pointer)

    def join(self, nonce: int) -> None:
        """Shows this rank's nonce in the segment and begins to beat."""
        self._library.join(self._pointer, nonce)

    def nonce_of(self, rank: int) -> int:
        """The nonce that rank shows in the segment."""
        return int(self._library.nonce(self._pointer, rank))

    def start(self) -> bool:
        """All ranks are there. Returns whether waits spin first."""
        return bool(self._library.start(self._pointer))

    def submit(self, code: int, source: torch.Tensor, target: torch.Tensor, part_bytes: int) -> int:
        """The number of the operation; 0 if the communicator is broken.

        code: from `operation_code`. part_bytes: Operation::bytes in native/operation.h.
        """
        self._let_go()
        try:
            number: int = self._submit(
                self._pointer, code, source.data_ptr(), target.data_ptr(), part_bytes
            )
            if number >= self._oldest.value:
                self._held.append((number, (source, target)))
        except BaseException:
            # An interrupt in between: nobody would hold the tensors, nor know the operation.
            self.abort()
            raise
        return number

    def submit_sums(self, code: int, tensors: Sequence[torch.Tensor]) -> int:
        """Sums each tensor in place, small neighbours as one message. The number of the last
        operation that was taken, with which all are done; 0 if the communicator is broken.

        code: of a sum of their dtype.
        """
        self._let_go()
        count = len(tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        words = _words_packer(2 * count)(*addresses, *[tensor.nbytes for tensor in tensors])
        try:
            number: int = self._library.submit_sums(self._pointer, code, words, count)
            if number >= self._oldest.value:
                self._held.append((number, tensors))
        except BaseException:
            # As above.
            self.abort()
            raise
        return number

    def _let_go(self) -> None:
        """Of tensors that nothing touches any more."""
        held = self._held
        while held and held[0][0] < self._oldest.value:
            held.popleft()

    def repeated_call(
        self, code: int, source: torch.Tensor, target: torch.Tensor, part_bytes: int
    ) -> RepeatedCall:
        """What `call_function` is given to submit the operation and to wait for it."""
        return RepeatedCall(self._pointer, code, source.data_ptr(), target.data_ptr(), part_bytes)

    @property
    def call_function(self) -> int:
        """Address of the function; see native/api.cpp."""
        return self._library.call_address

    @property
    def called_ns(self) -> int:
        """How long its calls took so far."""
        return self._called_ns.value

    def finished(self, number: int) -> bool:
        """True if it and all operations before it finished well; costs no call."""
        return number < self._oldest.value

    def poll(self, number: int) -> Status:
        """How the operation stands; never blocks."""
        status: int = self._library.poll(self._pointer, number)
        return _STATUSES[status]

    def wait(self, number: int, timeout_s: float | None) -> Status:
        """Waits for it; longer than `timeout_s` breaks the communicator."""
        timeout_ns = -1 if timeout_s is None else max(0, round(timeout_s * 1e9))
        status: int = self._library.wait(self._pointer, number, timeout_ns)
        return _STATUSES[status]

    def failure(self, name: str) -> CommunicatorError:
        """What broke the communicator, as the error of the operation called `name`."""
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        kind = FailureKind(self._library.failure(self._pointer, reason, _REASON_BYTES))
        text = reason.value.decode()
        return _ERRORS.get(kind, CommunicatorError)(f"{name}: {text}")

    def abort(self) -> None:
        """Fails what is pending and tells the other ranks; from any thread."""
        self._library.abort(self._pointer)

    def leave(self) -> None:
        """As `abort`, in peace."""
        self._library.leave(self._pointer)
