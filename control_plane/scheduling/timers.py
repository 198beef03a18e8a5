"""Times at which something is due, by key; the core turns the earliest into WakeAt."""

import heapq

TimerKey = tuple[str, str]
"""(kind, name of a group, worker or request)."""

LEFTOVERS_MAX = 64
"""Moved and cleared times that may stay in the heap, beyond as many as there are keys."""


class Timers:
    """One time per key, kept in a heap; a time that was moved or cleared is skipped in passing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, TimerKey]] = []
        self._when: dict[TimerKey, float] = {}

    def set(self, key: TimerKey, when: float) -> None:
        """Sets or moves the time of a key."""
        if self._when.get(key) != when:
            self._when[key] = when
            heapq.heappush(self._heap, (when, key))
            # Else cleared times far ahead, such as deadlines, would pile up until they pass.
            if len(self._heap) > 2 * len(self._when) + LEFTOVERS_MAX:
                self._heap = [(time, other) for other, time in self._when.items()]
                heapq.heapify(self._heap)

    def clear(self, key: TimerKey) -> None:
        """Forgets a key, if it is set."""
        self._when.pop(key, None)

    def postpone(self, kind: str, by_s: float) -> None:
        """Moves every time of one kind."""
        for key in [key for key in self._when if key[0] == kind]:
            self.set(key, self._when[key] + by_s)

    def has(self, key: TimerKey) -> bool:
        """Whether a key is set."""
        return key in self._when

    def earliest(self) -> float | None:
        """The earliest time of all."""
        while self._heap and self._when.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[TimerKey]:
        """Removes and returns the keys whose time has come, in order of time."""
        due: list[TimerKey] = []
        while (when := self.earliest()) is not None and when <= now:
            key = heapq.heappop(self._heap)[1]
            del self._when[key]
            due.append(key)
        return due
