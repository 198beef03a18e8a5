"""How cold requests are shared out among groups, under a virtual clock: equal chips get equal
shares whatever their steps measure by chance, slower ones get less, nobody is left out for ever."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from control_plane.config import SchedulingConfig
from control_plane.scheduling.step_time import StepWork, step_seconds
from tests.fakes.driven_core import DrivenCore
from tests.fakes.paced_groups import Asked, PacedChip, PacedGroups

SEEDS = range(6)
NOISE = 0.3
"""Steps of equal work differ by so much either way."""

RATE = 1800.0
"""Tokens of a prompt per second, as an undisturbed warm-up measures them."""


def chip(random: Random, times: float = 1.0, rate: float = RATE) -> PacedChip:
    """A CPU chip with a small model; `times` as slow."""

    def step_s(work: StepWork) -> float:
        seconds = step_seconds(work, 5e-4, 5e-8, 0.018, 0.002, 1e-7)
        return times * random.uniform(1 - NOISE, 1 + NOISE) * seconds

    return PacedChip(step_s, rate)


def short(random: Random, when: float) -> Asked:
    return Asked(when, random.randint(80, 200), random.randint(8, 60))


def batch(random: Random, count: int, spacing_s: float = 0.0) -> list[Asked]:
    return [short(random, index * spacing_s) for index in range(count)]


def stream(random: Random, count: int, per_s: float) -> list[Asked]:
    """Requests that come by chance, so many a second."""
    asked, when = [], 0.0
    for _ in range(count):
        when += random.expovariate(per_s)
        asked.append(short(random, when))
    return asked


@pytest.mark.parametrize("seed", SEEDS)
def test_every_batch_is_shared_by_equal_groups(seed: int) -> None:
    random = Random(seed)
    groups = PacedGroups([chip(random), chip(random)])
    for _ in range(3):
        for count, least in ((2, 1), (4, 1), (8, 3), (16, 6)):
            shares = groups.shares(batch(random, count))
            assert min(shares["g0"], shares["g1"]) >= least, shares
        for spacing_s in (0.1, 0.5):
            shares = groups.shares(batch(random, 8, spacing_s))
            assert min(shares["g0"], shares["g1"]) >= 2, shares


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("per_s", [0.5, 3.0, 12.0])
def test_a_stream_is_shared_by_equal_groups(seed: int, per_s: float) -> None:
    random = Random(seed)
    shares = PacedGroups([chip(random) for _ in range(3)]).shares(stream(random, 90, per_s))
    assert all(22 <= shares[group] <= 38 for group in ("g0", "g1", "g2")), shares


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warm_up_that_was_disturbed_changes_nothing(seed: int) -> None:
    random = Random(seed)
    groups = PacedGroups([chip(random), chip(random, rate=RATE / 10)])
    shares = groups.shares(stream(random, 20, 3.0))
    assert 6 <= shares["g1"] <= 14, shares


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_whose_first_steps_were_slow_gets_its_share_again(seed: int) -> None:
    random = Random(seed)
    sound = chip(random)
    disturbed = disturb(chip(random), chunks=3, times=8.0)
    groups = PacedGroups([sound, disturbed])
    groups.ask(stream(random, 60, 3.0))
    shares = groups.shares(stream(random, 40, 3.0))
    assert 14 <= shares["g1"] <= 26, shares


def disturb(sound: PacedChip, chunks: int, times: float) -> PacedChip:
    """So many chunks take so many times as long from the first on."""
    left = [times] * chunks

    def step_s(work: StepWork) -> float:
        return sound.step_s(work) * (left.pop() if work.chunk_tokens and left else 1.0)

    return PacedChip(step_s, sound.warm_up_rate / times)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chip_half_as_fast_gets_about_half_as_much(seed: int) -> None:
    random = Random(seed)
    groups = PacedGroups([chip(random), chip(random, times=2.0)])
    groups.ask(stream(random, 30, 3.0))  # Before it knows them it takes them for equal.
    shares = groups.shares(stream(random, 150, 12.0))
    assert 0.3 <= shares["g1"] / shares["g0"] <= 0.75, shares
    # With little to do most goes to the faster one, but not all: the other may have recovered.
    shares = groups.shares(stream(random, 150, 1.0))
    assert 0 < shares["g1"] / shares["g0"] <= 0.5, shares


def two_groups() -> DrivenCore:
    config = SchedulingConfig(group_sizes=(1, 1), block_tokens=4, running_max=64)
    return DrivenCore(config, blocks=600).serve(context_tokens=2000)


def submit_cold(core: DrivenCore, names: str) -> Counter[str]:
    """One request for each name, none with another's prefix; where they go."""
    before = requests_counts(core)
    for name in names:
        core.submit(name, [ord(name), *range(40)], max_tokens=50)
    return requests_counts(core) - before


def requests_counts(core: DrivenCore) -> Counter[str]:
    groups = core.core.snapshot(core.now).groups
    return +Counter({group.group_id: group.running + group.waiting for group in groups})


def decode_on_g0(core: DrivenCore, names: str, is_decoding: Callable[[], bool]) -> None:
    for name in names:
        core.submit(name, [ord(name), *range(40)], max_tokens=50, target_group="g0")
    while not is_decoding():
        core.finish_step("g0")


def test_requests_that_decode_count_as_work() -> None:
    core = two_groups()
    names = "abcdef"
    decode_on_g0(core, names, lambda: all(name in core.outputs for name in names))
    assert submit_cold(core, "ghi") == {"g1": 3}


def test_of_idle_groups_the_one_that_rested_longest_is_next() -> None:
    core = two_groups()
    served = []
    for name in "abcdef":
        (group_id,) = submit_cold(core, name)
        served.append(group_id)
        core.finish_all(group_id)
    assert served == ["g0", "g1"] * 3


def test_a_cached_prefix_counts_for_what_it_saves() -> None:
    core = two_groups()
    prefix = list(range(400))
    core.submit("first", prefix, max_tokens=1)
    (owner,) = requests_counts(core)
    core.finish_all(owner)
    for index in range(4):  # Idle, it stays where it is, though it would be the other's turn.
        core.submit(f"again{index}", [*prefix, index], max_tokens=1)
        assert requests_counts(core) == {owner: 1}
        core.finish_all(owner)
    for index in range(20):  # Busy, its owner lets go of it.
        core.submit(f"busy{index}", [*prefix, 9, index], max_tokens=50)
    counts = requests_counts(core)
    assert len(counts) == 2, counts
    assert counts[owner] > 10
