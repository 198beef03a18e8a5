"""Which tokens of a row survive top_k, top_p and min_p, found by their values alone.

    values     v0 >= v1 >= v2 >= v3 >= ...     sorted, without the ids they belong to
    kept       [ survivors ]                   every filter keeps a first part of this order
                          v                    the last value kept: ids at or above it survive

Values sort many times faster than ids by values, and in the usual case the largest few suffice.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_LARGEST_TRIED = 1024
"""Values among which top_p is tried first: a language model seldom spreads its mass over more."""


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """The filters of a row, as `sample` in `kernels.spec` defines them; temperature above 0."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    def keeps_all(self, vocabulary: int) -> bool:
        """Whether no token is dropped, whatever the logits."""
        return not 0 < self.top_k < vocabulary and self.top_p >= 1 and self.min_p <= 0

    def survivors(self, logits: Float32Array) -> Int64Array:
        """Ids of the tokens kept, ascending; the row has no NaN and no +inf, and not only -inf."""
        if 0 < self.top_k < len(logits):
            values = largest_values(logits, self.top_k)
            weights = self._weights(values)
            return first_ids(logits, values, self._kept_count(weights, float(weights.sum())))
        weights = self._weights(logits)
        if self.top_p >= 1:
            return np.flatnonzero(weights >= self.min_p)
        total = float(torch.from_numpy(weights).sum())
        values = largest_values(logits, min(_LARGEST_TRIED, len(logits)))
        kept_count = self._kept_count(self._weights(values), total)
        if kept_count == len(values) < len(logits):
            values = largest_values(logits, len(logits))
            kept_count = self._kept_count(self._weights(values), total)
        return first_ids(logits, values, kept_count)

    def _weights(self, logits: Float32Array) -> Float64Array:
        """Probabilities relative to the likeliest token's."""
        scaled = logits.astype(np.float64)
        scaled /= self.temperature
        scaled -= scaled.max()
        # torch's exponential uses the vector units, numpy's not on every machine.
        torch.from_numpy(scaled).exp_()
        return scaled

    def _kept_count(self, weights: Float64Array, total: float) -> int:
        """Tokens that top_p and min_p keep of the likeliest ones; total: the sum of all weights."""
        kept = weights >= self.min_p
        if self.top_p < 1:
            kept[1:] &= np.cumsum(weights[:-1]) < self.top_p * total
        return int(np.count_nonzero(kept))


def largest_values(logits: Float32Array, count: int) -> Float32Array:
    """The `count` largest logits, descending; no NaN."""
    largest = np.partition(logits, len(logits) - count)[len(logits) - count :]
    largest.sort()
    return largest[::-1]


def first_ids(logits: Float32Array, values: Float32Array, count: int) -> Int64Array:
    """Ids of the `count` largest logits, ascending, the lower ids on a tie; values: descending."""
    border = values[count - 1]
    ids = np.flatnonzero(logits >= border)
    if len(ids) > count:
        tied = np.flatnonzero(logits[ids] == border)
        ids = np.delete(ids, tied[count - len(ids) :])
    return ids
