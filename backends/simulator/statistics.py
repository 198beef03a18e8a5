"""What a simulated chip did with its time: busy, idle, communicating, and how much overlapped."""

from dataclasses import dataclass

# Intervals are merged when so many have come together.
_MERGE_AT = 4096


class Intervals:
    """A set of times as a union of intervals."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []
        self._merge_at = _MERGE_AT

    def add(self, start_s: float, end_s: float) -> None:
        """Adds one interval; it may overlap others."""
        if end_s > start_s:
            self._intervals.append((start_s, end_s))
            if len(self._intervals) >= self._merge_at:
                self._merge()
                self._merge_at = 2 * len(self._intervals) + _MERGE_AT

    def total_s(self) -> float:
        """The length of the union."""
        self._merge()
        return sum(end - start for start, end in self._intervals)

    def span_s(self) -> float:
        """From the first start to the last end."""
        self._merge()
        return self._intervals[-1][1] - self._intervals[0][0] if self._intervals else 0.0

    def _merge(self) -> None:
        merged: list[tuple[float, float]] = []
        for start, end in sorted(self._intervals):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        self._intervals = merged


@dataclass(frozen=True)
class Statistics:
    """Counts, bytes and simulated seconds since the chip was opened.

    busy_s: with work of any kind; idle_s: without, between its first work and its last.
    overlapped_s: communication while something else ran; host_wait_s: the host waiting for it.
    """

    launches: int
    copies: int
    copied_bytes: int
    collectives: int
    busy_s: float
    idle_s: float
    communication_s: float
    overlapped_s: float
    host_wait_s: float


class Recorder:
    """Collects the statistics of one chip."""

    def __init__(self) -> None:
        self.launches = 0
        self.copies = 0
        self.copied_bytes = 0
        self.collectives = 0
        self.host_wait_s = 0.0
        self._all = Intervals()
        self._computing = Intervals()
        self._communicating = Intervals()

    def ran(self, kind: str, start_s: float, end_s: float) -> None:
        """An operation of a kind took this time."""
        self._all.add(start_s, end_s)
        (self._communicating if kind == "collective" else self._computing).add(start_s, end_s)

    def statistics(self) -> Statistics:
        """The state now."""
        busy_s = self._all.total_s()
        communication_s = self._communicating.total_s()
        return Statistics(
            launches=self.launches,
            copies=self.copies,
            copied_bytes=self.copied_bytes,
            collectives=self.collectives,
            busy_s=busy_s,
            idle_s=self._all.span_s() - busy_s,
            communication_s=communication_s,
            overlapped_s=self._computing.total_s() + communication_s - busy_s,
            host_wait_s=self.host_wait_s,
        )
