"""Growing memory that nobody accounts for is noticed, and its operation named."""

import pytest
import torch

from backends.device import MemoryInfo
from backends.drift import UNKNOWN_OPERATION, DriftAlarm, MemoryDrift
from backends.kernel_table import KernelTable
from kernels.spec import Choice

MIB = 1 << 20
WINDOW = 64
THRESHOLD = 16 * MIB


class LeakyChip:
    """A chip whose kernels may keep a hidden buffer for every length they meet."""

    def __init__(self, shared=False):
        self.taken = 0
        self.asked = 0
        self.shared = shared
        self.kept = {}
        self.leaks = {}
        self.accounted = 0
        self.pending = 0

    def memory_info(self):
        self.asked += 1
        hidden = sum(self.kept.values()) + self.pending
        return MemoryInfo(1 << 40, (1 << 40) - self.taken - hidden - self.accounted, self.shared)

    def synchronize(self):
        self.pending = 0

    def reclaim(self):
        self.kept.clear()

    def kernel(self, operation):
        def call(length, x):
            if operation in self.leaks:
                self.kept.setdefault((operation, length), self.leaks[operation])
            return x

        return call

    def watched(self, threshold=THRESHOLD):
        drift = MemoryDrift(self, lambda: self.accounted, threshold, WINDOW)
        names = ("linear", "attention", "rotary")
        table = KernelTable(
            {name: self.kernel(name) for name in names},
            {name: Choice(name, "own", "first choice") for name in names},
        )
        return drift, drift.watched(table)


def run(drift, kernels, lengths, between=lambda: None):
    """Steps of three kernels each; the alarms raised on the way."""
    alarms = []
    for length in lengths:
        x = torch.zeros(4)
        for operation in ("linear", "attention", "rotary"):
            x = kernels.dispatch(operation, length, x)
        between()
        alarm = drift.observe()
        if alarm is not None:
            alarms.append(alarm)
    return alarms


@pytest.mark.parametrize("bytes_each", [MIB // 16, MIB, 40 * MIB])
def test_an_operation_that_keeps_memory_for_every_shape_is_named(bytes_each):
    chip = LeakyChip()
    drift, kernels = chip.watched()
    chip.leaks["attention"] = bytes_each
    alarms = run(drift, kernels, range(1000))
    assert alarms
    assert {alarm.operation for alarm in alarms} == {"attention"}
    assert all(alarm.bytes <= alarm.steps * bytes_each for alarm in alarms)
    assert alarms[0].bytes >= bytes_each


def test_the_faster_of_two_leaks_is_named():
    chip = LeakyChip()
    drift, kernels = chip.watched()
    chip.leaks = {"linear": MIB // 4, "rotary": 2 * MIB}
    assert run(drift, kernels, range(300))[0].operation == "rotary"


def test_memory_that_is_reclaimed_in_time_raises_no_alarm():
    chip = LeakyChip()
    drift, kernels = chip.watched()
    chip.leaks["attention"] = MIB
    assert run(drift, kernels, range(2000), chip.reclaim) == []
    assert not drift.armed


def test_one_buffer_per_shape_is_no_leak_when_shapes_repeat():
    chip = LeakyChip()
    drift, kernels = chip.watched()
    chip.leaks["attention"] = 4 * MIB
    assert run(drift, kernels, [step % 6 for step in range(1000)]) == []
    assert not drift.armed


def test_what_pool_and_scratch_account_for_is_no_drift():
    chip = LeakyChip()
    drift, kernels = chip.watched()

    def grow():
        chip.accounted += 5 * MIB

    assert run(drift, kernels, range(500), grow) == []


def test_growth_outside_of_kernels_is_reported_as_unknown():
    chip = LeakyChip()
    drift, kernels = chip.watched()

    def grow():
        chip.taken += 2 * MIB

    alarms = run(drift, kernels, range(60), grow)
    assert alarms[0] == DriftAlarm(UNKNOWN_OPERATION, 16 * MIB, 8)


def test_results_of_an_operation_are_not_held_against_it():
    chip = LeakyChip()

    def linear():
        chip.taken += 4096
        return torch.zeros(1024)

    drift = MemoryDrift(chip, lambda: 0, MIB, WINDOW)
    table = KernelTable({"linear": linear}, {"linear": Choice("linear", "own", "first choice")})
    kernels = drift.watched(table)
    chip.taken += MIB
    for _ in range(WINDOW // 16):
        drift.observe()
    assert drift.armed
    kernels.dispatch("linear")
    chip.taken += 2 * MIB
    assert drift.observe() == DriftAlarm(UNKNOWN_OPERATION, 2 * MIB + 4096, 1)


def test_what_work_under_way_holds_is_no_drift():
    chip = LeakyChip()
    drift, kernels = chip.watched()

    def grow():
        chip.pending += 5 * MIB

    assert run(drift, kernels, range(500), grow) == []
    assert not drift.armed


def test_results_in_a_list_are_not_held_against_an_operation_either():
    chip = LeakyChip()

    def linear():
        chip.taken += 4096
        return [torch.zeros(1024)]

    drift = MemoryDrift(chip, lambda: 0, MIB, WINDOW)
    table = KernelTable({"linear": linear}, {"linear": Choice("linear", "own", "first choice")})
    kernels = drift.watched(table)
    chip.taken += MIB
    for _ in range(WINDOW // 16):
        drift.observe()
    kernels.dispatch("linear")
    chip.taken += 2 * MIB
    assert drift.observe() == DriftAlarm(UNKNOWN_OPERATION, 2 * MIB + 4096, 1)


def test_a_quiet_chip_is_asked_a_few_times_a_window_only():
    chip = LeakyChip()
    drift, kernels = chip.watched()
    asked_before = chip.asked
    run(drift, kernels, range(10 * WINDOW))
    assert chip.asked - asked_before == 160


def test_memory_that_others_share_is_not_watched():
    chip = LeakyChip(shared=True)
    drift, kernels = chip.watched()
    asked_before = chip.asked
    chip.leaks["attention"] = 100 * MIB
    assert run(drift, kernels, range(200)) == []
    assert chip.asked == asked_before
