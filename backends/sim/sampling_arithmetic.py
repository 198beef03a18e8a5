"""What the chip's kernels behind a step's tokens compute: adjusting, drawing, listing; float64.

A draw is an exponential race: token v arrives at -ln(u_v) / weight_v, the first to arrive is drawn.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_ELEMENTS_MAX = 1 << 21
"""Logits looked at together: a few of the arrays below are as large, in float64."""

# The splitmix64 generator (Vigna's splitmix64.c, public domain).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Filters(NamedTuple):
    """Temperature and filters of some rows, each [R, 1]."""

    temperature: Float64Array
    top_k: Float64Array
    top_p: Float64Array
    min_p: Float64Array


def adjust(
    adjusted: torch.Tensor,
    row: torch.Tensor,
    token: torch.Tensor,
    bias: torch.Tensor,
    output_count: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Changes the named logits of `adjusted` in place."""
    table = adjusted.numpy()
    places = (row.numpy(), token.numpy())
    values = table[places].astype(np.float64) + bias.numpy()
    finite = np.isfinite(values)
    rates = repetition.numpy().astype(np.float64)
    counts = output_count.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.divide(values, rates, out=values * rates, where=values > 0)
        values -= frequency.numpy().astype(np.float64) * counts
        values -= np.where(counts > 0, presence.numpy(), 0.0)
    # What was infinite before the penalties stays so; the rest must stay a number.
    largest = np.finfo(np.float32).max
    table[places] = np.where(finite, np.clip(values, -largest, largest), values)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    ids: torch.Tensor,
    finite: torch.Tensor,
) -> None:
    """keys: seed, choice and index of each row, all int64; fills ids [R] and finite [R]."""
    usable = _usable(logits)
    finite.copy_(torch.from_numpy(usable))
    chosen = np.zeros(len(usable), dtype=np.int64)
    random = temperature.numpy() > 0
    greedy = np.flatnonzero(usable & ~random)
    table = logits.numpy()
    chosen[greedy] = [int(table[row].argmax()) for row in greedy]
    states = _states(*(key.numpy() for key in keys))
    rows_all = np.flatnonzero(usable & random)
    for rows in _pieces(rows_all, table.shape[1]):
        filters = Filters(*(_column(part, rows) for part in (temperature, top_k, top_p, min_p)))
        arrivals = _exponentials(states[rows], table.shape[1])
        with np.errstate(divide="ignore"):
            arrivals /= _weights(table[rows], filters)
        chosen[rows] = arrivals.argmin(axis=1)
    ids.copy_(torch.from_numpy(chosen))


def list_likeliest(
    logits: torch.Tensor,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    tops: torch.Tensor,
    top_ids: torch.Tensor,
) -> None:
    """Log-probabilities of `ids` and of the likeliest tokens, as `kernels.spec` says."""
    usable = _usable(logits)
    table, count = logits.numpy(), tops.shape[1]
    for row, (drawn, good) in enumerate(zip(ids.tolist(), usable.tolist(), strict=True)):
        if not good:
            chosen[row], tops[row] = torch.nan, torch.nan
            top_ids[row] = torch.arange(count)
            continue
        values = table[row].astype(np.float64)
        highest = values.max()
        total = highest + np.log(np.exp(values - highest).sum())
        likeliest = _largest(table[row], count)
        top_ids[row] = torch.from_numpy(likeliest)
        tops[row] = torch.from_numpy(values[likeliest] - total)
        chosen[row : row + 1] = torch.from_numpy(values[drawn : drawn + 1] - total)


def _usable(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Rows with a softmax: the largest of a row with a NaN is NaN."""
    found: npt.NDArray[np.bool_] = np.isfinite(logits.numpy().max(axis=1))
    return found


def _column(values: torch.Tensor, rows: Int64Array) -> Float64Array:
    column: Float64Array = values.numpy()[rows, None].astype(np.float64)
    return column


def _pieces(rows: Int64Array, vocabulary: int) -> list[Int64Array]:
    each = max(1, _ELEMENTS_MAX // vocabulary)
    return [rows[start : start + each] for start in range(0, len(rows), each)]


def _weights(logits: Float32Array, filters: Filters) -> Float64Array:
    """Probabilities relative to the row's likeliest token, zero where a filter drops the token."""
    weights: Float64Array = logits.astype(np.float64)
    weights -= weights.max(axis=1, keepdims=True)
    weights /= filters.temperature
    np.exp(weights, out=weights)
    limited = (filters.top_k > 0) & (filters.top_k < weights.shape[1])
    filtered = np.flatnonzero(limited | (filters.top_p < 1) | (filters.min_p > 0))
    for row in filtered:
        order = np.argsort(-logits[row], kind="stable")
        ordered = weights[row, order]
        if limited[row, 0]:
            ordered[int(filters.top_k[row, 0]) :] = 0.0
        if filters.top_p[row, 0] < 1:
            reached = np.cumsum(ordered)
            over = np.searchsorted(reached, filters.top_p[row, 0] * reached[-1])
            ordered[max(1, int(over) + 1) :] = 0.0
        ordered[ordered < filters.min_p[row, 0]] = 0.0
        weights[row, order] = ordered
    return weights


def _largest(logits: Float32Array, count: int) -> Int64Array:
    """Ids of the largest logits, the largest first, the lower id first on a tie."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    border = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= border)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return candidates[order]


def _states(seed: Int64Array, choice: Int64Array, index: Int64Array) -> UInt64Array:
    """One generator state a row, a hash of the three."""
    state: UInt64Array = np.zeros(len(seed), dtype=np.uint64)
    for part in (seed, choice, index):
        state = _mix(state + part.view(np.uint64) + _GAMMA)
    return state


def _exponentials(states: UInt64Array, vocabulary: int) -> Float64Array:
    """-ln(u) of every row and token: u has 52 bits and a half, so it is neither 0 nor 1."""
    counters = np.arange(1, vocabulary + 1, dtype=np.uint64) * _GAMMA
    bits = _mix(states[:, None] + counters)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    arrivals: Float64Array = np.log(uniform, out=uniform)
    return np.negative(arrivals, out=arrivals)


def _mix(bits: UInt64Array) -> UInt64Array:
    """splitmix64's output function."""
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: UInt64Array = bits ^ (bits >> np.uint64(31))
    return mixed
