"""The requests that wait for a slot of one group, and the order in which they are tried."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable

from control_plane.scheduling.live_request import LiveRequest

WINDOW = 64
"""Requests looked at per order and step; bounds the cost of a step, whatever the queue's length."""


class WaitingQueue:
    """Order: requests of a lost group, then retracted and aged ones by arrival, then by priority
    and policy (`lpm`: longest resident prefix first; `fcfs`: arrival)."""

    def __init__(self, policy: str, ageing_s: float) -> None:
        self._by_prefix = policy == "lpm"
        self._ageing_s = ageing_s
        self._requests: dict[str, LiveRequest] = {}
        self._by_arrival: list[LiveRequest] = []
        self._by_priority: list[LiveRequest] = []
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, live: LiveRequest) -> bool:
        return live.request_id in self._requests

    def add(self, live: LiveRequest) -> None:
        """Puts a request in its place; `front` and `arrival` must not change while it waits."""
        assert live not in self, live.request_id
        self._requests[live.request_id] = live
        insort(self._by_arrival, live, key=_arrival_key)
        insort(self._by_priority, live, key=_priority_key)
        self._priorities[live.request.priority] += 1

    def remove(self, live: LiveRequest) -> bool:
        """Takes a request out; False if it does not wait here."""
        if self._requests.pop(live.request_id, None) is None:
            return False
        del self._by_arrival[bisect_left(self._by_arrival, _arrival_key(live), key=_arrival_key)]
        place = bisect_left(self._by_priority, _priority_key(live), key=_priority_key)
        del self._by_priority[place]
        self._priorities[live.request.priority] -= 1
        if not self._priorities[live.request.priority]:
            del self._priorities[live.request.priority]
        return True

    def ordered(self, now: float, matched: Callable[[LiveRequest], int]) -> list[LiveRequest]:
        """The next requests to try, best first; `matched` gives a resident prefix in tokens."""
        window = self._by_arrival[:WINDOW]
        if len(self._priorities) > 1:
            seen = {live.arrival for live in window}
            window += [live for live in self._by_priority[:WINDOW] if live.arrival not in seen]

        def rank(live: LiveRequest) -> tuple[int, int, int, int]:
            if live.front:
                return (0, 0, 0, live.arrival)
            if live.retractions or now - live.arrived_at >= self._ageing_s:
                return (1, 0, 0, live.arrival)
            prefix = -matched(live) if self._by_prefix else 0
            return (2, -live.request.priority, prefix, live.arrival)

        return sorted(window, key=rank)


def _arrival_key(live: LiveRequest) -> tuple[bool, int]:
    return (not live.front, live.arrival)


def _priority_key(live: LiveRequest) -> tuple[int, int]:
    return (-live.request.priority, live.arrival)
