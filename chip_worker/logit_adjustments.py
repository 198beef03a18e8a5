"""What bias, penalties and suppression change of a step's logits, as entries of (row, token)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from chip_worker.slots import Slot

Column = TypeVar("Column")
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_NO_IDS: Int64Array = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class LogitAdjustments:
    """Columns of equal length, for the operation `adjust_logits`; no pair (row, token) twice."""

    row: Int64Array
    token: Int64Array
    output_count: Int64Array
    bias: Float32Array
    presence: Float32Array
    frequency: Float32Array
    repetition: Float32Array

    def packed(self) -> tuple[Int64Array, Float32Array]:
        """[3, N] and [4, N], the columns in the order of the fields: two copies carry them all."""
        return (
            np.stack((self.row, self.token, self.output_count)),
            np.stack((self.bias, self.presence, self.frequency, self.repetition)),
        )


def unpacked(whole: Iterable[Column], real: Iterable[Column]) -> tuple[Column, ...]:
    """What was packed, taken apart, in the order of the arguments of `adjust_logits`."""
    row, token, output_count = whole
    bias, presence, frequency, repetition = real
    return row, token, bias, output_count, presence, frequency, repetition


def adjust_rows(slots: Sequence[Slot], vocabulary: int) -> LogitAdjustments | None:
    """The entries of all rows, in the order of `slots`; None if no row asks for any.

    Ids from `vocabulary` on are left out: nobody can draw them.
    """
    entries = [
        found
        for row, slot in enumerate(slots)
        if (found := _adjust_row(row, slot, vocabulary)) is not None
    ]
    if not entries:
        return None
    columns = (
        np.concatenate([getattr(entry, field.name) for entry in entries])
        for field in fields(LogitAdjustments)
    )
    return LogitAdjustments(*columns)


def _adjust_row(row: int, slot: Slot, vocabulary: int) -> LogitAdjustments | None:
    sampling = slot.sampling
    biases = _biases(slot, vocabulary)
    counts_output = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    counts_all = sampling.repetition_penalty != 1
    if not (biases or counts_output or counts_all):
        return None
    output = slot.tokens[slot.output_start : slot.known] if counts_output else _NO_IDS
    output = output[output < vocabulary]
    seen = slot.tokens[: slot.known] if counts_all else _NO_IDS
    seen = seen[seen < vocabulary]
    biased = np.array(list(biases), dtype=np.int64)
    # Tables as long as the vocabulary: sorting the ids of a long context would take far longer.
    is_seen = _mark(vocabulary, seen)
    token = np.flatnonzero(_mark(vocabulary, seen, output, biased))
    bias = np.zeros(token.size, dtype=np.float32)
    bias[np.searchsorted(token, biased)] = list(biases.values())
    return LogitAdjustments(
        row=np.full(token.size, row, dtype=np.int64),
        token=token,
        bias=bias,
        output_count=np.bincount(output, minlength=vocabulary)[token],
        presence=np.full(token.size, sampling.presence_penalty, dtype=np.float32),
        frequency=np.full(token.size, sampling.frequency_penalty, dtype=np.float32),
        repetition=np.where(is_seen[token], sampling.repetition_penalty, 1.0).astype(np.float32),
    )


def _biases(slot: Slot, vocabulary: int) -> dict[int, float]:
    """Token id to what is added; what may not be drawn stays so, however it is favoured."""
    sampling = slot.sampling
    biases = dict(sampling.logit_bias)
    if slot.known - slot.output_start < sampling.min_tokens:
        biases.update(dict.fromkeys(sampling.suppressed_ids, -math.inf))
    return {token_id: value for token_id, value in biases.items() if token_id < vocabulary}


def _mark(vocabulary: int, *ids: Int64Array) -> npt.NDArray[np.bool_]:
    marked = np.zeros(vocabulary, dtype=np.bool_)
    for part in ids:
        marked[part] = True
    return marked
