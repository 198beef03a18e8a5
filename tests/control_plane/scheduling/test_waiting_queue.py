"""The order of waiting requests under every policy, and that nobody starves under any."""

from random import Random

import pytest

from control_plane.config import POLICIES
from control_plane.scheduling.live_request import LiveRequest
from control_plane.scheduling.waiting_queue import WINDOW, WaitingQueue
from tests.fakes.driven_core import make_request

AGEING_S = 5.0
SEEDS_COUNT = 40


def waiting(arrival: int, tokens: int = 10, *, priority: int = 0, at: float = 0.0) -> LiveRequest:
    request = make_request(f"r{arrival}", range(tokens), priority=priority)
    return LiveRequest(request, arrival, at, 8, list(request.prompt_ids), uses_cache=True)


def queue_of(policy: str, lives: list[LiveRequest]) -> WaitingQueue:
    queue = WaitingQueue(policy, AGEING_S)
    for live in lives:
        queue.add(live)
    return queue


def names(lives: list[LiveRequest]) -> list[int]:
    return [live.arrival for live in lives]


MATCHED = {1: 0, 2: 8, 3: 4, 4: 4}
"""Tokens of the resident prefix, by arrival."""


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [1, 2, 3, 4]),
        ("lpm", [2, 3, 4, 1]),
        ("shortest-prefill-first", [4, 2, 3, 1]),
        ("priority", [3, 1, 2, 4]),
    ],
)
def test_each_policy_has_its_order_and_arrival_decides_the_rest(policy, order) -> None:
    lives = [
        waiting(1, 10),
        waiting(2, 12),  # 4 to compute
        waiting(3, 8, priority=2),  # 4 to compute
        waiting(4, 6),  # 2 to compute
    ]
    queue = queue_of(policy, lives)
    assert names(queue.ordered(1.0, lambda live: MATCHED[live.arrival])) == order


@pytest.mark.parametrize("policy", POLICIES)
def test_lost_groups_then_retracted_and_aged_ones_come_before_any_policy(policy) -> None:
    lives = [waiting(i, 40, at=3.0) for i in range(1, 4)]
    aged, retracted, lost = waiting(4, 50, at=0.0), waiting(5, 60, at=3.0), waiting(6, 70, at=3.0)
    retracted.retractions = 1
    lost.front = True
    short = waiting(7, 1, priority=9, at=3.0)
    queue = queue_of(policy, [*lives, retracted, short, lost, aged])
    assert names(queue.ordered(AGEING_S, lambda _: 0))[:3] == [6, 4, 5]


@pytest.mark.parametrize(
    ("policy", "changes"),
    [("shortest-prefill-first", {"tokens": 2}), ("priority", {"priority": 5})],
)
def test_what_the_policy_prefers_is_seen_behind_a_full_window(policy, changes) -> None:
    lives = [waiting(i) for i in range(1, 3 * WINDOW)]
    preferred = waiting(4 * WINDOW, **changes)
    queue = queue_of(policy, [*lives, preferred])
    ordered = queue.ordered(1.0, lambda _: 0)
    assert ordered[0] is preferred
    assert len(ordered) <= 2 * WINDOW
    assert queue.remove(preferred)
    assert names(queue.ordered(1.0, lambda _: 0))[0] == 1


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "shortest-prefill-first"])
def test_priority_is_nothing_to_the_other_policies(policy) -> None:
    queue = queue_of(policy, [waiting(i, priority=i) for i in range(1, 9)])
    assert names(queue.ordered(1.0, lambda _: 0)) == list(range(1, 9))


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_and_the_queue_forgets_nobody(policy, only_seed) -> None:
    """Short, urgent and cached requests keep coming, as many as are served; still everyone is
    served before those that came when it had aged already."""
    for seed in range(SEEDS_COUNT) if only_seed is None else [only_seed]:
        random = Random(seed)
        queue, unserved, now, arrivals = WaitingQueue(policy, AGEING_S), {}, 0.0, 0
        backlog = random.choice([5, 70, 100])
        while arrivals < backlog + 60 or unserved:
            now += random.uniform(0.0, 0.3)
            for _ in range(backlog if not arrivals else arrivals < backlog + 60):
                arrivals += 1
                tokens, priority = random.randint(1, 60), random.randint(-3, 3)
                live = waiting(arrivals, tokens, priority=priority, at=now)
                queue.add(live)
                unserved[arrivals] = live
            ordered = queue.ordered(now, lambda live: live.arrival * 7 % 9)
            assert len(ordered) == len(set(names(ordered)))
            oldest = unserved[min(unserved)]
            if now - oldest.arrived_at >= AGEING_S:
                assert ordered[0] is oldest, f"seed {seed}: an aged request is overtaken"
            assert queue.remove(ordered[0])
            assert not queue.remove(ordered[0])
            del unserved[ordered[0].arrival]
            assert len(queue) == len(unserved)
