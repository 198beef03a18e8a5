"""Times by key."""

from control_plane.scheduling.timers import LEFTOVERS_MAX, Timers


def test_due_keys_come_in_order_of_time_once() -> None:
    timers = Timers()
    timers.set(("a", "x"), 3.0)
    timers.set(("b", "x"), 1.0)
    timers.set(("a", "y"), 2.0)
    timers.set(("a", "x"), 0.5)
    timers.clear(("b", "x"))
    assert timers.earliest() == 0.5
    assert timers.take_due(2.0) == [("a", "x"), ("a", "y")]
    assert timers.take_due(9.0) == []
    assert timers.earliest() is None


def test_postponing_moves_one_kind_only() -> None:
    timers = Timers()
    timers.set(("a", "x"), 1.0)
    timers.set(("b", "x"), 2.0)
    timers.postpone("a", 5.0)
    assert timers.take_due(5.0) == [("b", "x")]
    assert timers.take_due(6.0) == [("a", "x")]


def test_cleared_times_far_ahead_do_not_pile_up() -> None:
    timers = Timers()
    timers.set(("deadline", "stays"), 1e6)
    for i in range(10_000):
        timers.set(("deadline", str(i)), 1e6 + i)
        timers.clear(("deadline", str(i)))
    assert len(timers._heap) <= LEFTOVERS_MAX + 4
    assert timers.take_due(2e6) == [("deadline", "stays")]
