"""What measured throughput recommends: the peak less 20 %, and no more than memory holds less 20 %.

throughput
  best    |            .  *  .          chunk size or batch: the smallest whose throughput is
  80 %    |- - - - o                    at least 80 % of the best
          |     .                       batch: less where memory holds fewer requests
          +----------------------
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scripts.calibration.calibration_file import CalibratedSettings

SHARE = 0.8
"""Of the best throughput, and of the memory: beyond it more costs latency and gains little."""
RISE_MIN = 1.05
"""Ratio of neighbours from which throughput counts as rising: less is noise or not worth it."""


@dataclass(frozen=True)
class Rate:
    """Tokens a second of steps of one size: tokens of a chunk, or rows that decode."""

    size: int
    tokens_per_s: float


@dataclass(frozen=True)
class Recommendation:
    """The settings and, for people, what limits them."""

    settings: CalibratedSettings
    remarks: tuple[str, ...]


def recommend(
    chunks: Sequence[Rate],
    batches: Sequence[Rate],
    rows_held: int | None = None,
    limited: Collection[str] = (),
) -> Recommendation:
    """Settings from both curves, each with at least one rate, their sizes ascending.

    rows_held: requests that KV memory holds at once; None where it holds all that were asked for.
    limited: of "--chunks" and "--batches", those whose last size is the largest that can be
    measured.
    """
    remarks: list[str] = []
    for rates, option in ((chunks, "--chunks"), (batches, "--batches")):
        remarks += _end_reached(rates, option, larger=option not in limited)
    running_max = smallest_good(batches)
    if rows_held is not None and running_max > (most := max(1, int(SHARE * rows_held))):
        running_max = most
        remarks.append(
            f"KV memory holds {rows_held} such requests: {SHARE:.0%} of them is what --max-running "
            "may be; give more memory with --kv-blocks, or measure shorter ones with --position"
        )
    return Recommendation(CalibratedSettings(smallest_good(chunks), running_max), tuple(remarks))


def smallest_good(rates: Sequence[Rate]) -> int:
    """The smallest size whose throughput is at least `SHARE` of the best."""
    best = max(rate.tokens_per_s for rate in rates)
    return next(rate.size for rate in rates if rate.tokens_per_s >= SHARE * best)


def _end_reached(rates: Sequence[Rate], option: str, *, larger: bool) -> list[str]:
    """A remark if throughput may still rise where the sweep ends: the best may lie beyond.

    larger: whether larger sizes can be measured.
    """
    last = rates[-1]
    if len(rates) == 1:
        if not larger and last.size == 1:
            return []
        others = f"several {option}, if context and memory allow" if larger else f"smaller {option}"
        return [
            f"only {last.size} was measured, and nothing says that it is good: measure {others}"
        ]
    if not larger or any(last.tokens_per_s < RISE_MIN * rate.tokens_per_s for rate in rates[:-1]):
        return []
    return [
        f"the sweep's end was reached: throughput still rises at {last.size}; measure larger "
        f"{option}, if context and memory allow"
    ]
