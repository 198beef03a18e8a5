"""Time of a simulated chip: launches, overlap and waits add up exactly."""

from dataclasses import replace

import pytest
import torch

from backends.simulator.clock import VirtualClock, WallClock
from backends.simulator.profile import ADVERSARIAL, IDEAL, PROFILES, XRE_NATIVE, sourced

LAUNCH_S = 10e-6


def nothing():
    """A kernel without arithmetic."""


def test_many_small_kernels_cost_their_launches_and_large_ones_themselves(new_chip):
    """The knee of a chunk-size sweep: below it the host is the limit, above it the chip."""
    for seconds in (1e-6, 5e-6, 10e-6, 20e-6, 40e-6):
        chip = new_chip()
        for _ in range(100):
            chip.launch("kernel", nothing, seconds=seconds)
        chip.synchronize()
        expected = 100 * LAUNCH_S + seconds if seconds <= LAUNCH_S else LAUNCH_S + 100 * seconds
        assert chip.clock.now_s == pytest.approx(expected, rel=1e-9)
        statistics = chip.statistics()
        assert statistics.launches == 100
        assert statistics.busy_s == pytest.approx(100 * seconds, rel=1e-6)
        assert statistics.idle_s == pytest.approx(99 * max(0.0, LAUNCH_S - seconds), abs=1e-12)


def test_two_streams_overlap_and_an_event_takes_the_overlap_away(new_chip):
    for waits, expected in ((False, 1e-3 + 2 * LAUNCH_S), (True, 2e-3 + LAUNCH_S)):
        chip = new_chip()
        side = chip.stream()
        chip.launch("first", nothing, seconds=1e-3)
        if waits:
            side.wait_event(chip.record())
        chip.launch("second", nothing, seconds=1e-3, stream=side)
        chip.synchronize()
        assert chip.clock.now_s == pytest.approx(expected, rel=1e-9)


def test_the_host_does_not_wait_before_it_synchronizes(new_chip):
    chip = new_chip()
    chip.launch("kernel", nothing, seconds=1.0)
    assert chip.clock.now_s == pytest.approx(LAUNCH_S)
    chip.clock.advance(0.25)
    chip.synchronize()
    assert chip.clock.now_s == pytest.approx(1.0 + LAUNCH_S)
    assert chip.statistics().host_wait_s == pytest.approx(0.75)


def test_copies_take_the_link_to_the_host(new_chip):
    chip = new_chip(host_link_bytes_per_s=1e6)
    tensor = chip.allocate_tensor((250,), torch.float32)
    chip.copy_from_host(torch.zeros(250), tensor, blocking=True)
    assert chip.clock.now_s == pytest.approx(1e-3 + LAUNCH_S)
    statistics = chip.statistics()
    assert (statistics.copies, statistics.copied_bytes) == (1, 1000)


def test_a_kernel_takes_its_bytes_and_its_arithmetic(new_profile):
    profile = new_profile(memory_bytes_per_s=1e9, flops_per_s=1e12)
    assert profile.seconds(moved_bytes=1e6, flops=2e9) == pytest.approx(3e-3)


class FakeTime:
    def __init__(self):
        self.now_s = 100.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds


def test_a_wall_clock_sleeps_where_the_chip_would_be_slower_than_the_host():
    fake = FakeTime()
    clock = WallClock(real=lambda: fake.now_s, sleep=fake.sleep)
    clock.advance(20e-6)
    assert fake.slept == [], "too short to sleep"
    clock.wait_until(0.5)
    assert sum(fake.slept) == pytest.approx(0.5)
    fake.now_s += 2.0
    assert clock.now_s == pytest.approx(2.5)
    clock.wait_until(1.0)
    assert sum(fake.slept) == pytest.approx(0.5)
    for _ in range(1000):
        clock.advance(20e-6)
        assert clock.now_s - (fake.now_s - 100.0) < 1e-3 + 1e-9
    assert sum(fake.slept) == pytest.approx(0.52, abs=1e-3)


def test_a_virtual_clock_never_goes_back():
    clock = VirtualClock()
    clock.wait_until(2.0)
    clock.wait_until(1.0)
    clock.advance(0.5)
    clock.wait_forever()
    assert clock.now_s == 2.5


def test_profiles_count_what_nobody_has_a_source_for():
    assert list(PROFILES) == ["ideal", "p800_shim", "xre_native", "adversarial"]
    for name, profile in PROFILES.items():
        assert profile.name == name
        constants = dict(profile.constants())
        assert len(constants) > 25
        assert all(constant.source for constant in constants.values())
        assert 0 < profile.assumed_count < len(constants)
    assert replace(IDEAL, launch_s=sourced(1e-6, "measured")).assumed_count == (
        IDEAL.assumed_count - 1
    )
    assert IDEAL.launch_s.value == 20e-6
    assert IDEAL.launch_s.label == "assumed"
    assert XRE_NATIVE.event_query.value == "unsupported"
    assert ADVERSARIAL.stale_reads_after_async_copy.value
