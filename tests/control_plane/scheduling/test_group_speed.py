"""What is expected of a group, from its own steps and from those of its make."""

import pytest

from control_plane.scheduling.group_speed import (
    OWN_MEMORY,
    PACE_CHUNK_TOKENS,
    GroupSpeed,
    MakeSpeed,
)


def pair(first_rate: float = 1000.0, second_rate: float = 1000.0) -> tuple[GroupSpeed, GroupSpeed]:
    make = MakeSpeed()
    return GroupSpeed(make, first_rate), GroupSpeed(make, second_rate)


def measure(speed: GroupSpeed, token_s: float, count: int = 20) -> None:
    for _ in range(count):
        speed.measure(token_s, PACE_CHUNK_TOKENS)


def test_groups_of_a_make_are_equal_until_they_measured_something() -> None:
    first, second = pair(1000.0, 250.0)
    assert first.token_s == second.token_s == pytest.approx(0.0025)


def test_a_group_is_what_it_measures_once_it_measured_enough() -> None:
    first, second = pair()
    for _ in range(20):
        first.measure(0.001, PACE_CHUNK_TOKENS)
        second.measure(0.002, PACE_CHUNK_TOKENS)
    assert 1.6 < second.token_s / first.token_s <= 2.0


def test_one_chunk_convinces_nobody_and_a_small_one_less() -> None:
    one, _ = pair()
    measure(one, 0.001)
    before = one.token_s
    small, _ = pair()
    measure(small, 0.001)
    one.measure(0.01, PACE_CHUNK_TOKENS)
    small.measure(0.01, 4)
    assert before < small.token_s < before * 1.1
    assert small.token_s < one.token_s < before + 0.01 / (OWN_MEMORY - 1)


def test_an_idle_group_becomes_what_its_make_is() -> None:
    used, idle = pair()
    measure(used, 0.001)
    measure(idle, 0.01, count=4)
    measure(used, 0.001, count=60)
    assert idle.token_s > 4 * used.token_s
    for _ in range(40):
        idle.pass_by(groups_count=2)
    assert idle.token_s == pytest.approx(used.token_s, rel=0.15)


def test_a_turn_comes_less_often_among_more_groups() -> None:
    few, _ = pair()
    many, _ = pair()
    for speed in (few, many):
        measure(speed, 0.01)
        speed._make.add(0.001, 1.0)
    for _ in range(2):
        few.pass_by(groups_count=2)
    for _ in range(32):
        many.pass_by(groups_count=32)
    assert few.token_s == pytest.approx(many.token_s)


def test_makes_know_nothing_of_each_other() -> None:
    slow, fast = GroupSpeed(MakeSpeed(), 100.0), GroupSpeed(MakeSpeed(), 1000.0)
    for _ in range(40):
        slow.pass_by(groups_count=2)
    assert (slow.tokens_per_s, fast.tokens_per_s) == pytest.approx((100.0, 1000.0))


def test_a_group_that_measured_nothing_at_all_has_a_rate() -> None:
    speed = GroupSpeed(MakeSpeed(), 0.0)
    assert (speed.token_s, speed.tokens_per_s) == (0.0, 1.0)
    speed.pass_by(groups_count=1)
    speed.measure(0.5, 1)
    assert 0 < speed.token_s <= 0.5
