"""The requests that wait for a slot of one group, and the order in which they are tried."""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from control_plane.scheduling.live_request import LiveRequest

WINDOW = 64
"""Requests looked at per order and step; bounds the cost of a step, whatever the queue's length."""
PASSED_MAX = 8
"""Requests that may be passed in one step because they lack blocks; bounds its cost, too."""


class WaitingQueue:
    """Order: requests of a lost group, then retracted and aged ones by arrival, then by policy.

    fcfs: by arrival. lpm: longest resident prefix first. shortest-prefill-first: fewest tokens to
    compute first. priority: highest first. What is equal goes by arrival.

    Looked at are the next requests by arrival, and the first by what the policy knows of a request
    from the start (its length, its priority), so that a short or urgent one is seen behind many.
    """

    def __init__(self, policy: str, ageing_s: float) -> None:
        self._policy = policy
        self._ageing_s = ageing_s
        self._requests: dict[str, LiveRequest] = {}
        self._by_arrival: list[LiveRequest] = []
        self._by_policy: list[LiveRequest] = []
        """In the policy's static order; empty if it has none but arrival."""
        self._has_static_order = policy in ("shortest-prefill-first", "priority")

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, live: LiveRequest) -> bool:
        return live.request_id in self._requests

    def add(self, live: LiveRequest) -> None:
        """Puts a request in its place; its `front`, `arrival` and tokens stay while it waits."""
        assert live not in self, live.request_id
        self._requests[live.request_id] = live
        insort(self._by_arrival, live, key=_arrival_key)
        if self._has_static_order:
            insort(self._by_policy, live, key=self._static_key)

    def remove(self, live: LiveRequest) -> bool:
        """Takes a request out; False if it does not wait here."""
        if self._requests.pop(live.request_id, None) is None:
            return False
        del self._by_arrival[bisect_left(self._by_arrival, _arrival_key(live), key=_arrival_key)]
        if self._has_static_order:
            key = self._static_key
            del self._by_policy[bisect_left(self._by_policy, key(live), key=key)]
        return True

    def ordered(self, now: float, matched: Callable[[LiveRequest], int]) -> list[LiveRequest]:
        """The next requests to try, best first; `matched` gives a resident prefix in tokens."""
        window = self._by_arrival[:WINDOW]
        seen = {live.arrival for live in window}
        window += [live for live in self._by_policy[:WINDOW] if live.arrival not in seen]

        def rank(live: LiveRequest) -> tuple[int, int, int]:
            if live.front:
                return (0, 0, live.arrival)
            if self._keeps_its_place(live, now):
                return (1, 0, live.arrival)
            return (2, self._preference(live, matched), live.arrival)

        return sorted(window, key=rank)

    def may_pass(self, live: LiveRequest, lacking: Sequence[LiveRequest], now: float) -> bool:
        """Whether `live` may go before those `ordered` put before it that lack blocks.

        Small requests go on while a large one waits for blocks, but only until that has aged.
        """
        if len(lacking) > PASSED_MAX or self._keeps_its_place(lacking[-1], now):
            return False
        is_as_urgent = live.request.priority >= lacking[-1].request.priority
        return self._policy != "priority" or is_as_urgent

    def _keeps_its_place(self, live: LiveRequest, now: float) -> bool:
        """Whether arrival alone decides when it goes."""
        waited_s = now - live.arrived_at
        return live.front or live.retractions > 0 or waited_s >= self._ageing_s

    def _preference(self, live: LiveRequest, matched: Callable[[LiveRequest], int]) -> int:
        """What the policy goes by; the least is the best."""
        match self._policy:
            case "lpm":
                return -matched(live)
            case "shortest-prefill-first":
                return len(live.token_ids) - matched(live)
            case "priority":
                return -live.request.priority
            case _:
                return 0

    def _static_key(self, live: LiveRequest) -> tuple[int, int]:
        if self._policy == "priority":
            return (-live.request.priority, live.arrival)
        return (len(live.token_ids), live.arrival)


def _arrival_key(live: LiveRequest) -> tuple[bool, int]:
    return (not live.front, live.arrival)
