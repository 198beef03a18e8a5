"""Address space that stands for a chip's memory: as large as the chip's, poison where unwritten.

Poison is NaN in every float dtype that models use and far out of range as an index, so what reads
memory that nobody wrote is seen in the result. Large areas are poisoned by mapping one small file
of poison over them: that takes no memory until somebody writes, and gives back what was written.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

# float32 0xFFCDFFCD, bfloat16 and float16 0xFFCD are NaN; as int32 it is below -3 million.
POISON = b"\xcd\xff"

_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_PIECE_BYTES = 1 << 24
# Smaller areas are filled: quicker than a system call a piece, and never many mappings.
_MAPPED_FROM_BYTES = 1 << 22
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class PoisonedMemory:
    """`size` bytes at one address range; tensors over it keep it alive."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._poison_file = -1
        pages = max(size, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, pages, flags=flags)
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes from `offset`, with a storage of its own."""
        count = 1
        for length in shape:
            count *= length
        if count == 0:
            one = torch.frombuffer(self._memory, dtype=dtype, offset=offset, count=1)
            return one[:0].view(tuple(shape))
        flat = torch.frombuffer(self._memory, dtype=dtype, offset=offset, count=count)
        return flat.view(tuple(shape))

    def poison(self, offset: int, size: int) -> None:
        """Makes the contents of an area poison; offset and size are even."""
        if size < _MAPPED_FROM_BYTES:
            self._fill(offset, size)
            return
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        self._fill(offset, first - offset)
        self._fill(end, offset + size - end)
        for start in range(first, end, _PIECE_BYTES):
            self._map_poison(start, min(_PIECE_BYTES, end - start))

    def _fill(self, offset: int, size: int) -> None:
        self._memory[offset : offset + size] = POISON * (size // len(POISON))

    def _map_poison(self, offset: int, size: int) -> None:
        if self._poison_file < 0:
            self._poison_file = os.memfd_create("poison")
            os.write(self._poison_file, POISON * (_PIECE_BYTES // len(POISON)))
        mapped = _libc.mmap(
            self.address + offset,
            size,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | _MAP_FIXED,
            self._poison_file,
            0,
        )
        if mapped == _FAILED:
            raise OSError(ctypes.get_errno(), "cannot map poison over simulated memory")

    def __del__(self) -> None:
        """The file goes; what is mapped of it stays until the mapping does."""
        if self._poison_file >= 0:
            os.close(self._poison_file)
