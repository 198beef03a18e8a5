"""Drawing tokens and listing the likeliest on CPU cores: row by row, within a core's cache."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from backends.cpu.token_filters import (
    Float32Array,
    Float64Array,
    Int64Array,
    TokenFilter,
    first_ids,
    largest_values,
)

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def adjust_logits(
    logits: torch.Tensor,
    row: torch.Tensor,
    token: torch.Tensor,
    bias: torch.Tensor,
    output_count: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """See `adjust_logits` in `kernels.spec`: one gather, one scatter."""
    values = logits[row, token].double().add_(bias)
    infinite = values.isfinite().logical_not_()
    rate = repetition.double()
    values = values.mul(rate).where(values <= 0, values.div(rate))
    values.sub_(frequency.double() * output_count).sub_(presence * output_count.sign())
    # A clamp would make numbers of the infinite ones, which have to stay as they are.
    limit = torch.finfo(torch.float32).max
    values = values.where(infinite, values.clamp(-limit, limit))
    return logits.index_put((row, token), values.float())


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    index: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sample` in `kernels.spec`."""
    finite = _has_softmax(logits)
    filters = zip(*(part.tolist() for part in (temperature, top_k, top_p, min_p)), strict=True)
    keys = zip(*(part.tolist() for part in (seed, choice, index)), strict=True)
    ids = [
        _draw(row, TokenFilter(*kept), key) if usable else 0
        for row, kept, key, usable in zip(
            logits.numpy(), filters, keys, finite.tolist(), strict=True
        )
    ]
    return torch.tensor(ids, dtype=torch.int64), finite


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, tops_count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `token_logprobs` in `kernels.spec`."""
    finite = _has_softmax(logits)
    normalizer = logits.logsumexp(dim=-1, keepdim=True).masked_fill_(~finite[:, None], torch.nan)
    chosen = logits.gather(-1, ids[:, None]) - normalizer
    top_ids = torch.arange(tops_count).repeat(len(logits), 1)
    if tops_count:
        rows = logits.numpy()
        for row in finite.nonzero()[:, 0].tolist():
            top_ids[row] = torch.from_numpy(_top_ids(rows[row], tops_count))
    return chosen[:, 0], logits.gather(-1, top_ids) - normalizer, top_ids


def _top_ids(logits: Float32Array, count: int) -> Int64Array:
    """Ids of the largest logits, largest first, the lower id first on a tie."""
    ids = first_ids(logits, largest_values(logits, count), count)
    return ids[np.argsort(-logits[ids], kind="stable")]


def _has_softmax(logits: torch.Tensor) -> torch.Tensor:
    """A maximum tells all: it is NaN if anything is."""
    return logits.amax(dim=-1).isfinite()


def _draw(logits: Float32Array, kept: TokenFilter, key: tuple[int, int, int]) -> int:
    """argmax of logits / temperature + noise: log-probabilities differ by a constant only."""
    if kept.temperature <= 0:
        return int(logits.argmax())
    counters = _counters(len(logits))
    if kept.keeps_all(len(logits)):
        return int(_scores(logits, kept.temperature, counters, key).argmax())
    ids = kept.survivors(logits)
    return int(ids[_scores(logits[ids], kept.temperature, counters[ids], key).argmax()])


def _scores(
    logits: Float32Array, temperature: float, counters: UInt64Array, key: tuple[int, int, int]
) -> Float64Array:
    scores = logits.astype(np.float64)
    scores /= temperature
    scores += _noise(key, counters)
    return scores


def _noise(key: tuple[int, int, int], counters: UInt64Array) -> Float64Array:
    """Gumbel noise of the token ids whose counters are given, for (seed, choice, index)."""
    state = 0
    for part in key:
        state = _mix_one((state + part + _GAMMA) & _MASK)
    bits = counters + np.uint64(state)
    spare = np.empty_like(bits)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        np.right_shift(bits, np.uint64(shift), out=spare)
        bits ^= spare
        bits *= np.uint64(multiplier)
    np.right_shift(bits, np.uint64(31), out=spare)
    bits ^= spare
    bits >>= np.uint64(12)
    noise: Float64Array = bits.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


def _mix_one(state: int) -> int:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state = ((state ^ state >> shift) * multiplier) & _MASK
    return state ^ state >> 31


@lru_cache(maxsize=4)
def _counters(vocabulary: int) -> UInt64Array:
    """(id + 1) * gamma for every token id; one vocabulary a model."""
    counters: UInt64Array = np.arange(1, vocabulary + 1, dtype=np.uint64)
    counters *= np.uint64(_GAMMA)
    return counters
