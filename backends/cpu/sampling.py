"""Drawing tokens on CPU cores: greedy rows at once, drawn rows one by one within a cache."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `sample` in `kernels.spec`."""
    finite = torch.isfinite(logits).all(dim=-1)
    if not bool(finite.all()):
        logits = logits.masked_fill(~finite[:, None], 0.0)
    ids = logits.argmax(dim=-1)
    keys = zip(temperature.tolist(), seed.tolist(), choice.tolist(), index.tolist(), strict=True)
    for row, (row_temperature, *key) in enumerate(keys):
        if row_temperature > 0:
            ids[row] = _draw(logits[row], row_temperature, key)
    ids.masked_fill_(~finite, 0)
    logprobs = logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1)
    return ids, logprobs.masked_fill_(~finite, 0.0), finite


def _draw(logits: torch.Tensor, temperature: float, key: list[int]) -> int:
    """argmax of logits / temperature + noise: log-probabilities differ by a constant only."""
    scores = logits.double().numpy()
    scores /= temperature
    scores += _noise(key, len(scores))
    return int(scores.argmax())


def _noise(key: list[int], vocabulary: int) -> npt.NDArray[np.float64]:
    """Gumbel noise of every token id for (seed, choice, index)."""
    state = 0
    for part in key:
        state = _mix_one((state + part + _GAMMA) & _MASK)
    bits = _counters(vocabulary) + np.uint64(state)
    spare = np.empty_like(bits)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        np.right_shift(bits, np.uint64(shift), out=spare)
        bits ^= spare
        bits *= np.uint64(multiplier)
    np.right_shift(bits, np.uint64(31), out=spare)
    bits ^= spare
    bits >>= np.uint64(12)
    noise: npt.NDArray[np.float64] = bits.astype(np.float64)
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
