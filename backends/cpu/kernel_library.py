"""The native kernels as ctypes sees them: what kernels/cpu exports, built by setup.

ctypes gives up Python's lock for the time of a call.
"""

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from backends.cpu.options import INSTRUCTIONS
from backends.errors import BackendUnavailable
from backends.weight_form import WeightForm
from kernels.library import LibraryUnusable, open_library

NUMBERS = {torch.float32: 0, torch.bfloat16: 1}
"""Number in kernels/cpu/packed_matrix.h."""

FORMS = {WeightForm.PLAIN: 0, WeightForm.Q8_0: 1, WeightForm.Q4_0: 2, WeightForm.Q4_1: 3}
"""Form there."""

TILE = 32
"""kPanelRows and kColumnTile there."""

HEAD_SIZE_MAX = 256
"""kHeadSizeMax in kernels/cpu/attention.h."""

SPIN_NS = 50_000
"""About what it takes to wake a thread."""


class Rows(ctypes.Structure):
    """Rows in kernels/cpu/rows.h."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("outer_stride", ctypes.c_int64),
        ("inner_stride", ctypes.c_int64),
    )


class Product(ctypes.Structure):
    """Product in kernels/cpu/linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("output_number", ctypes.c_int32),
    )


class Lookup(ctypes.Structure):
    """Lookup in kernels/cpu/rows.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("outer", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("first_row", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("table", Rows),
        ("table_rows", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("output", Rows),
    )


class RmsNorm(ctypes.Structure):
    """RmsNorm in kernels/cpu/rows.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("input", Rows),
        ("weight", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("output", Rows),
    )


class AddRmsNorm(ctypes.Structure):
    """AddRmsNorm in kernels/cpu/rows.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("outer", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("input", Rows),
        ("residual", Rows),
        ("residual_number", ctypes.c_int32),
        ("weight", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("output", Rows),
        ("total", Rows),
    )


class Rotary(ctypes.Structure):
    """Rotary in kernels/cpu/rows.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("input", Rows),
        ("positions", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("output", Rows),
    )


class GatedActivation(ctypes.Structure):
    """GatedActivation in kernels/cpu/rows.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("outer", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("input", Rows),
        ("output", Rows),
    )


class WriteKV(ctypes.Structure):
    """WriteKV in kernels/cpu/rows.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("outer", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("keys", Rows),
        ("values", Rows),
        ("cached_keys", ctypes.c_void_p),
        ("cached_values", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("blocks_count", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
    )


class AttentionStep(ctypes.Structure):
    """AttentionStep in kernels/cpu/attention.h."""

    _fields_ = (
        ("number", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("context_starts", ctypes.c_void_p),
        ("table_starts", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("query_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("q_to_kv", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("soft_cap", ctypes.c_float),
    )


class AttentionLayer(ctypes.Structure):
    """AttentionLayer in kernels/cpu/attention.h."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("query", Rows),
        ("output", Rows),
    )


@cache
def load_library() -> ctypes.CDLL:
    """The library. Raises BackendUnavailable saying why there is none that fits."""
    try:
        library = open_library()
    except LibraryUnusable as error:
        raise BackendUnavailable(str(error)) from error
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("engine_open", pointer, (ctypes.c_int32, number, ctypes.c_int32)),
        ("engine_free", None, (pointer,)),
        ("program_make", pointer, ()),
        ("program_free", None, (pointer,)),
        ("program_call", None, (pointer, pointer, pointer)),
        ("program_run", ctypes.c_int32, (pointer, pointer, ctypes.c_int32)),
        ("record", None, (pointer, pointer)),
        ("matrix_make", pointer, (pointer, ctypes.c_int32, ctypes.c_int32, number, number)),
        ("matrix_free", None, (pointer,)),
        ("matrix_write", None, (pointer, pointer, number, number, pointer)),
        (
            "matrix_write_blocks",
            None,
            (pointer, pointer, ctypes.c_int32, number, number, pointer),
        ),
        ("matrix_read", None, (pointer, pointer, number, pointer)),
        ("linear", None, (pointer, ctypes.POINTER(Product))),
        ("lookup", None, (pointer, ctypes.POINTER(Lookup))),
        ("rms_norm", None, (pointer, ctypes.POINTER(RmsNorm))),
        ("add_rms_norm", None, (pointer, ctypes.POINTER(AddRmsNorm))),
        ("rotary", None, (pointer, ctypes.POINTER(Rotary))),
        ("gated_activation", None, (pointer, ctypes.POINTER(GatedActivation))),
        ("write_kv", ctypes.c_bool, (pointer, ctypes.POINTER(WriteKV))),
        ("attention_plan", pointer, (pointer, ctypes.POINTER(AttentionStep))),
        ("attention_plan_renew", ctypes.c_bool, (pointer, pointer, ctypes.POINTER(AttentionStep))),
        ("attention_plan_tokens_spared", number, (pointer,)),
        ("attention_plan_free", None, (pointer,)),
        ("attention", None, (pointer, pointer, ctypes.POINTER(AttentionLayer))),
    ):
        function = getattr(library, f"polychip_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def packed_bytes(shape: Sequence[int], dtype: torch.dtype, form: WeightForm) -> int:
    """What a matrix takes, with its padding to whole panels and tiles."""
    rows, columns = (-(-size // TILE) * TILE for size in shape)
    if form is WeightForm.PLAIN:
        return rows * columns * dtype.itemsize
    # Panels hold what blocks do, in another order.
    return rows * (columns // form.block_columns) * form.block_bytes


class PackedMatrix:
    """A weight [N, K] in the order the kernels read it; see kernels/cpu/packed_matrix.h."""

    def __init__(
        self,
        engine: "Engine",
        shape: Sequence[int],
        dtype: torch.dtype,
        form: WeightForm = WeightForm.PLAIN,
    ) -> None:
        """Raises MemoryError."""
        rows, columns = shape
        library = engine.library
        address = library.polychip_matrix_make(
            engine.address, NUMBERS[dtype], FORMS[form], rows, columns
        )
        if not address:
            raise MemoryError(f"no memory for a matrix of {tuple(shape)}")
        self.engine = engine
        self.address: int = address
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.form = form
        self.nbytes = packed_bytes(shape, dtype, form)
        weakref.finalize(self, library.polychip_matrix_free, address).atexit = False

    def write(self, first: int, rows: torch.Tensor) -> None:
        """See `Device.write_rows`."""
        if self.form is WeightForm.PLAIN:
            assert rows.dtype == self.dtype, f"{rows.dtype} into a matrix of {self.dtype}"
        else:
            assert self.form is WeightForm.Q8_0, f"numbers into a matrix of {self.form}"
            rows = rows.float()
        rows = rows.contiguous()
        count, columns = rows.shape
        assert columns == self.shape[1], f"rows of {columns} into a matrix of {self.shape}"
        assert 0 <= first <= first + count <= self.shape[0], f"rows {first} + {count}"
        self.engine.library.polychip_matrix_write(
            self.engine.address, self.address, first, count, rows.data_ptr()
        )

    def write_blocks(self, first: int, blocks: torch.Tensor, form: WeightForm) -> None:
        """See `Device.write_blocks`."""
        rows, columns = self.shape
        assert self.form in (form, WeightForm.PLAIN), f"{form} into a matrix of {self.form}"
        assert blocks.dtype == torch.uint8, blocks.dtype
        expected = form.row_bytes(columns)
        assert blocks.shape[1:] == (expected,), f"rows of {blocks.shape} into {self.shape}"
        assert 0 <= first <= first + len(blocks) <= rows, f"rows {first} + {len(blocks)}"
        blocks = blocks.contiguous()
        self.engine.library.polychip_matrix_write_blocks(
            self.engine.address,
            self.address,
            FORMS[form],
            first,
            len(blocks),
            blocks.data_ptr(),
        )

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n] int64 -> [n, K]. Raises IndexError for a row that it has not."""
        rows = rows.contiguous()
        assert rows.dtype == torch.int64, rows.dtype
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.shape[0]:
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a matrix of {self.shape}")
        found = torch.empty((len(rows), self.shape[1]), dtype=self.dtype)
        self.engine.library.polychip_matrix_read(
            self.address, rows.data_ptr(), len(rows), found.data_ptr()
        )
        return found


class Outputs(Protocol):
    """Where results of recorded operations are put."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Contents undefined. Raises OutOfMemory."""


class Engine:
    """The threads of one chip, whoever calls among them, and its packed weights."""

    def __init__(self, threads: int, instructions: str = "", spin_ns: int = SPIN_NS) -> None:
        """instructions: of INSTRUCTIONS; empty for the best. Raises BackendUnavailable.

        spin_ns: how long a thread that waits keeps its core before it sleeps.
        """
        self.library = load_library()
        known = INSTRUCTIONS[: self.library.polychip_best_instructions() + 1]
        self.instructions = instructions or known[-1]
        if self.instructions not in known:
            raise BackendUnavailable(
                f"this machine has no instructions {instructions!r}; it has {', '.join(known)}"
            )
        self.address: int = self.library.polychip_engine_open(
            threads, spin_ns, INSTRUCTIONS.index(self.instructions)
        )
        if not self.address:
            raise BackendUnavailable(
                f"cannot start {threads} threads: raise the limit of processes"
            )
        weakref.finalize(self, self.library.polychip_engine_free, self.address).atexit = False
        self.recorded_outputs: Outputs | None = None
        """Set while operations are recorded instead of computed."""

    def output(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """For the result of an operation; contents undefined."""
        if self.recorded_outputs is None:
            return torch.empty(shape, dtype=dtype)
        return self.recorded_outputs.allocate(shape, dtype)
