"""Pauses between the starts of a process that ends again and again."""

from control_plane.child_processes import RestartPause


def test_the_pause_grows_and_forgets() -> None:
    pause = RestartPause()
    assert [pause.next_s(1.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pause.next_s(61.0) == 0.5
    assert pause.next_s(1.0) == 1.0
