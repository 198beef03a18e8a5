"""Native draws and log-probabilities.

Each agrees with the reference it replaces; see kernels/cpu/sampling.h.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch

from backends.cpu.kernel_library import Engine
from kernels.spec import Implementation, Support


class LogitRows(ctypes.Structure):
    """LogitRows in kernels/cpu/logit_rows.h."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
    )


class Sample(ctypes.Structure):
    """Sample in kernels/cpu/sampling.h."""

    _fields_ = (
        ("logits", LogitRows),
        ("temperature", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("choice", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
    )


class TokenLogprobs(ctypes.Structure):
    """TokenLogprobs in kernels/cpu/token_logprobs.h."""

    _fields_ = (
        ("logits", LogitRows),
        ("ids", ctypes.c_void_p),
        ("tops", ctypes.c_int64),
        ("logprobs", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
    )


class NativeSampling:
    """The operations on one engine."""

    def __init__(self, engine: Engine) -> None:
        library = engine.library
        for function, call, result in (
            (library.polychip_sample, Sample, None),
            (library.polychip_token_logprobs, TokenLogprobs, ctypes.c_bool),
        ):
            function.argtypes = (ctypes.c_void_p, ctypes.POINTER(call))
            function.restype = result
        self._library = library
        self._owner = engine
        self._engine = engine.address
        self._name = f"native, {engine.instructions}"

    def implementations(self) -> Sequence[Implementation]:
        """All of them."""
        logits = Support(dtypes=("float32",))
        return [
            Implementation("sample", self._name, self.sample, logits),
            Implementation("token_logprobs", self._name, self.token_logprobs, logits),
        ]

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        index: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exactly the reference's draws, but where two scores are the same but for rounding."""
        logits = _side_by_side(logits)
        rows = len(logits)
        columns = (temperature, seed, choice, index, top_k, top_p, min_p)
        dtypes = (torch.float32, *[torch.int64] * 4, *[torch.float32] * 2)
        for column, dtype in zip(columns, dtypes, strict=True):
            _check(column, dtype, rows)
        together = [column.contiguous() for column in columns]
        ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        call = Sample(
            _logit_rows(logits),
            *(column.data_ptr() for column in together),
            ids.data_ptr(),
            finite.data_ptr(),
        )
        self._library.polychip_sample(self._engine, byref(call))
        return ids, finite

    def token_logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, tops_count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums in float64, rounded once. Raises IndexError for an id that is in no row."""
        logits = _side_by_side(logits)
        rows, vocabulary = logits.shape
        _check(ids, torch.int64, rows)
        assert 0 <= tops_count <= vocabulary, f"{tops_count} of {vocabulary} logits"
        ids = ids.contiguous()
        logprobs = torch.empty(rows)
        top_logprobs = torch.empty((rows, tops_count))
        top_ids = torch.empty((rows, tops_count), dtype=torch.int64)
        call = TokenLogprobs(
            _logit_rows(logits),
            ids.data_ptr(),
            tops_count,
            logprobs.data_ptr(),
            top_logprobs.data_ptr(),
            top_ids.data_ptr(),
        )
        if not self._library.polychip_token_logprobs(self._engine, byref(call)):
            raise IndexError(f"a token's id is not in the vocabulary of {vocabulary}")
        return logprobs, top_logprobs, top_ids


def _side_by_side(logits: torch.Tensor) -> torch.Tensor:
    """The logits of a row side by side; rows may lie anywhere."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.shape[1] > 0, "no vocabulary"
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _logit_rows(logits: torch.Tensor) -> LogitRows:
    return LogitRows(logits.data_ptr(), logits.stride(0), *logits.shape)


def _check(column: torch.Tensor, dtype: torch.dtype, rows: int) -> None:
    assert column.dtype == dtype, f"{column.dtype} for {dtype}"
    assert column.shape == (rows,), f"{tuple(column.shape)} for {rows} rows"
