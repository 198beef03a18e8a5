"""Faults of simulated chips: what the script says happens, and every later call knows."""

from functools import partial

import pytest
import torch

from backends.errors import (
    BackendUnavailable,
    DeviceError,
    DeviceHung,
    DeviceLost,
    OutOfMemory,
)
from backends.simulator.chip import SimulatedChip
from backends.simulator.clock import WallClock
from backends.simulator.faults import ChipFaults, Fault, parse_faults
from backends.simulator.kernel_rules import KernelRejected, check_arguments
from backends.simulator.profile import ADVERSARIAL, IDEAL, P800_SHIM


def nothing():
    """A kernel without arithmetic."""


def test_a_script_is_read():
    script = "chip3:error@launch=120, hang@collective=3,slow@launch=10:x20,leak@attention,fail@open"
    assert parse_faults(script) == (
        Fault("error", "launch", 120, chip=3),
        Fault("hang", "collective", 3),
        Fault("slow", "launch", 10, 20.0),
        Fault("leak", "attention"),
        Fault("fail", "open"),
    )
    assert parse_faults("  ") == ()


@pytest.mark.parametrize(
    "script",
    [
        "error@launch",
        "error@launch=0",
        "explode@launch=1",
        "slow@launch=3",
        "error@launch=3:x2",
        "oom@launch=3",
        "fail@launch=3",
        "fail@open=2",
        "leak@launch",
        "chip:fail@open",
        "error@launch=1,",
        "fail@later",
    ],
)
def test_a_bad_script_is_refused_with_the_grammar(script):
    with pytest.raises(BackendUnavailable, match="faults are written"):
        parse_faults(script)


def test_a_fault_strikes_the_chip_it_names():
    faults = parse_faults("chip1:fail@open")
    assert ChipFaults(faults, 0).at_stage("open") is None
    assert ChipFaults(faults, 1).at_stage("open") == "fail"


def test_an_error_is_sticky_freeing_included(new_chip):
    chip = new_chip(faults="error@launch=2")
    region = chip.allocate(64)
    view = region.view((4,), torch.float32)
    view.zero_()
    for _ in range(3):
        chip.launch("add", lambda: view.add_(1), writes=[view])
    with pytest.raises(DeviceLost, match="add failed: scripted fault; every later call"):
        chip.synchronize()
    assert torch.equal(view, torch.ones(4)), "nothing happens after the error"
    for call in (
        lambda: chip.free(region),
        lambda: chip.allocate(64),
        lambda: chip.launch("add", nothing),
        lambda: chip.copy_to_host(view, torch.zeros(4)),
        chip.synchronize,
        chip.memory_info,
        chip.record,
    ):
        with pytest.raises(DeviceLost):
            call()


def test_an_error_that_does_not_stick_is_told_once(new_chip):
    chip = new_chip(faults="error@launch=1", sticky_errors=False)
    ran = []
    for name in ("first", "second"):
        chip.launch(name, lambda name=name: ran.append(name))
    with pytest.raises(DeviceError, match="first failed"):
        chip.synchronize()
    chip.synchronize()
    assert ran == ["second"]


def test_poison_as_an_index_is_an_illegal_access(new_chip):
    chip = new_chip()
    table = chip.allocate_tensor((4,), torch.int64)
    chip.launch("gather", lambda: torch.zeros(8)[table], reads=[table])
    with pytest.raises(DeviceLost, match="gather failed: index"):
        chip.synchronize()


def test_a_hang_ends_at_the_caller_s_timeout_without_real_time(new_chip):
    chip = new_chip(faults="hang@launch=1")
    chip.launch("attention", nothing)
    started_s = chip.clock.now_s
    with pytest.raises(DeviceHung, match="hangs at attention"):
        chip.synchronize(timeout_s=3600.0)
    assert chip.clock.now_s == pytest.approx(started_s + 3600)
    with pytest.raises(DeviceHung):
        chip.synchronize()
    assert chip.in_flight > 0


def test_a_hang_in_paced_time_lasts_as_long_as_the_timeout(new_profile):
    slept = []
    clock = WallClock(real=lambda: sum(slept), sleep=slept.append)
    chip = SimulatedChip(
        new_profile(), 0, clock, faults=ChipFaults(parse_faults("hang@launch=1,hang@open"))
    )
    with pytest.raises(DeviceHung, match="hangs at open"):
        chip.pass_stage("open", timeout_s=0.5)
    chip.launch("attention", nothing)
    with pytest.raises(DeviceHung):
        chip.fence().wait(timeout_s=2.0)
    assert sum(slept) == pytest.approx(2.5, abs=1e-3)


def test_work_that_is_slow_misses_a_timeout_but_gets_done(new_chip):
    chip = new_chip(faults="slow@launch=2:x20")
    for _ in range(2):
        chip.launch("kernel", nothing, seconds=0.1)
    with pytest.raises(DeviceHung, match="not done after"):
        chip.synchronize(timeout_s=1.0)
    chip.synchronize(timeout_s=1.2)
    assert chip.clock.now_s == pytest.approx(2.1, abs=1e-3)


def test_an_allocation_fails_where_the_script_says_so(new_chip):
    chip = new_chip(faults="oom@allocate=2")
    chip.allocate(64)
    with pytest.raises(OutOfMemory, match="scripted"):
        chip.allocate(64)
    chip.allocate(64)


def test_death_ends_the_process_or_loses_the_chip(new_chip):
    deaths = []
    chip = new_chip(faults="death@launch=2", die=lambda: deaths.append("died"))
    chip.launch("kernel", nothing)
    with pytest.raises(DeviceLost, match="died"):
        chip.launch("kernel", nothing)
    assert deaths == ["died"]


def test_stages_of_starting_fail(new_chip):
    chip = new_chip(faults="fail@probe_collective,fail@load")
    chip.pass_stage("open")
    for stage in ("probe_collective", "load"):
        with pytest.raises(DeviceError, match=f"fails at {stage}"):
            chip.pass_stage(stage)


def test_a_wrong_operation_is_wrong_silently_once_or_always(new_chip):
    for faults, expected in (("wrong@logits", [-4, -4, 5]), ("wrong@logits=2", [5, -4, 5])):
        chip = new_chip(faults=faults)
        results = []
        for name in ("logits", "logits", "linear"):
            result = chip.allocate_tensor((1,), torch.float32)
            chip.launch(name, lambda result=result: result.fill_(5), writes=[result])
            results.append(result)
        chip.synchronize()
        assert [int(result[0]) for result in results] == expected


def test_a_wrong_operation_can_say_what_its_wrong_results_are(new_chip):
    chip = new_chip(faults="wrong@write=2")
    cache = chip.allocate_tensor((4,), torch.float32)
    for place in range(2):
        wrong = partial(cache[place].fill_, 7)
        chip.launch("write", partial(cache[place].fill_, 5), reads=[cache], wrong=wrong)
    chip.synchronize()
    assert cache[:2].tolist() == [5, 7]
    assert cache[2:].isnan().all()


def test_a_large_batch_is_silently_wrong_where_the_profile_says_so(new_chip):
    chip = new_chip(wrong_result_rows_min=96)
    for rows in (95, 96):
        result = chip.allocate_tensor((rows,), torch.float32)
        chip.launch("moe", lambda result=result: result.fill_(5), writes=[result], rows=rows)
        chip.synchronize()
        assert (result == 5).all() == (rows < 96)


def test_kernels_reject_what_the_chip_s_kernels_reject():
    wide, ids = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    check_arguments(IDEAL, "linear", [wide.t(), wide.double()], indices=[ids], decode_rows=10**6)
    check_arguments(P800_SHIM, "linear", [wide], indices=[ids.int()], decode_rows=512)
    for tensors, options, why in (
        ([wide.t()], {}, "not contiguous"),
        ([wide.double()], {}, "no float64"),
        ([torch.zeros(4, 6)], {}, "24 bytes, which is not a multiple of 16"),
        ([], {"indices": [ids]}, "expected Int but found Long"),
        ([], {"decode_rows": 513}, "513 rows of at most 512"),
    ):
        with pytest.raises(KernelRejected, match=why):
            check_arguments(P800_SHIM, "linear", tensors, **options)
    with pytest.raises(KernelRejected, match="65 rows of at most 64"):
        check_arguments(ADVERSARIAL, "attention", [], decode_rows=65)
