"""How a chunk is shared among prefills, and the order of rows."""

import pytest

from control_plane.scheduling.step_planner import has_chunk_left, share_chunk
from control_plane.scheduling.timers import Timers


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        ([], []),
        ([10], [10]),
        ([1000], [100]),
        ([1000, 10], [90, 10]),
        ([1000, 500, 10], [25, 65, 10]),
        ([5, 500], [5, 95]),
        ([1000, 1000, 1000], [25, 75, 0]),
    ],
)
def test_the_oldest_is_sure_of_a_quarter_and_short_ones_go_first(demands, expected) -> None:
    assert share_chunk(demands, 100, 0.25) == expected


def test_a_chunk_is_never_exceeded_and_never_wasted() -> None:
    for oldest in range(1, 40, 3):
        for other in range(1, 40, 3):
            shares = share_chunk([oldest, other], 16, 0.25)
            assert sum(shares) == min(16, oldest + other)
            assert shares[0] >= min(oldest, 4)


def test_one_more_prefill_fits_while_the_others_leave_something() -> None:
    assert has_chunk_left([], 100, 0.25)
    assert has_chunk_left([1000], 100, 0.25)
    assert has_chunk_left([1000, 74], 100, 0.25)
    assert not has_chunk_left([1000, 75], 100, 0.25)


def test_a_step_without_room_for_prompts_takes_none() -> None:
    assert share_chunk([1000, 10], 0, 0.25) == [0, 0]
    assert not has_chunk_left([], 0, 0.25)
    assert not has_chunk_left([1000], 0, 0.25)


def test_timers_fire_in_order_of_time_and_forget_what_was_moved() -> None:
    timers = Timers()
    timers.set(("a", "x"), 3.0)
    timers.set(("a", "y"), 2.0)
    timers.set(("a", "x"), 1.0)
    timers.set(("a", "z"), 1.5)
    timers.clear(("a", "z"))
    assert timers.earliest() == 1.0
    assert timers.take_due(5.0) == [("a", "x"), ("a", "y")]
    assert timers.earliest() is None
