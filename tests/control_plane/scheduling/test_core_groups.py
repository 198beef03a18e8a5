"""Groups and workers through the core: forming, losing, replaying, blaming."""

import random

import pytest

from control_plane.config import SchedulingConfig
from control_plane.errors import ServiceUnavailable, WorkerFailure
from control_plane.scheduling.messages import (
    Condemn,
    DropWorker,
    FormGroup,
    Heartbeat,
    Log,
    LogLevel,
    LossKind,
    RendezvousOpened,
    ResetWorker,
    SendRendezvous,
    ServingChanged,
    StepDone,
    Tick,
    WakeAt,
    WorkerFaulted,
    WorkerLost,
)
from control_plane.scheduling.name_order import name_order
from tests.fakes.driven_core import DrivenCore, reference


def driven(*sizes: int, **changes) -> DrivenCore:
    return DrivenCore(SchedulingConfig(group_sizes=sizes, block_tokens=4, **changes))


def lose(core: DrivenCore, worker_id: str, incarnation: int = 1):
    return core.handle(WorkerLost(worker_id, incarnation, LossKind.STREAM, "killed"))


def of_kind(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def state_of(core: DrivenCore, worker_id: str) -> str:
    workers = core.core.snapshot(core.now).workers
    return next(worker.state for worker in workers if worker.worker_id == worker_id)


def test_a_group_forms_when_its_last_rank_attaches_and_meets_at_rank_zero() -> None:
    core = driven(2)
    assert core.attach("chip1") == []
    forms = core.attach("chip0")
    assert [(f.worker_id, f.rank, f.world_size) for f in forms] == [
        ("chip0", 0, 2),
        ("chip1", 1, 2),
    ]
    relayed = core.handle(RendezvousOpened("chip0", 1, forms[0].epoch, b"here"))
    assert of_kind(relayed, SendRendezvous) == [SendRendezvous("chip1", 1, forms[0].epoch, b"here")]
    assert of_kind(core.make_ready(forms[0]), ServingChanged) == []
    assert of_kind(core.make_ready(forms[1]), ServingChanged) == [ServingChanged(("g0",))]


def test_a_worker_shows_its_capacity_while_it_serves() -> None:
    def blocks(core: DrivenCore) -> list[int]:
        return [worker.blocks for worker in core.core.snapshot(core.now).workers]

    core = driven(2)
    forms = [*core.attach("chip0"), *core.attach("chip1")]
    core.make_ready(forms[0])
    assert blocks(core) == [0, 0]
    core.make_ready(forms[1])
    assert blocks(core) == [core.blocks] * 2
    lose(core, "chip1")
    assert blocks(core) == [0, 0]


def test_names_stand_in_the_order_of_their_numbers() -> None:
    core = driven(*[1] * 12)
    effects = []
    for number in random.Random(0).sample(range(12), 12):
        for form in core.attach(f"chip{number}"):
            effects = core.make_ready(form)
    snapshot = core.core.snapshot(core.now)
    assert [worker.worker_id for worker in snapshot.workers] == [f"chip{n}" for n in range(12)]
    groups = tuple(f"g{number}" for number in range(12))
    assert tuple(group.group_id for group in snapshot.groups) == groups
    assert of_kind(effects, ServingChanged) == [ServingChanged(groups)]


def test_names_of_people_are_sorted_by_text_and_number() -> None:
    names = ["a10-2", "a2", "", "10", "chip", "2", "a10", "chip01", "chip1", "b", "a10-10"]
    ordered = ["", "2", "10", "a2", "a10", "a10-2", "a10-10", "b", "chip", "chip01", "chip1"]
    assert sorted(names, key=name_order) == ordered


def test_a_block_is_a_common_multiple_of_what_the_chips_like() -> None:
    core = driven(1)
    (form,) = core.attach("chip0", block_tokens_multiple=6)
    assert form.block_tokens == 12
    core.make_ready(form)
    core.submit("a", range(30), max_tokens=20)
    core.finish_all()
    core.submit("b", range(30), max_tokens=2)
    assert core.plans[-1].admissions[0].cached_count == 24
    core.finish_all()
    assert core.outputs["b"] == core.outputs["a"][:2]


def test_another_model_in_a_group_is_not_used() -> None:
    core = driven(2, fewer_chips=False)
    core.attach("chip0")
    assert core.attach("chip1", model_digest="other") == []
    assert state_of(core, "chip1") == "mismatched"
    assert core.attach("chip1", 2), "the right one is used"


def test_a_lost_worker_replays_its_requests_elsewhere_without_a_gap() -> None:
    core = driven(1, 1).serve()
    core.submit("a", range(6), max_tokens=12, target_group=None)
    group_id = core.plans[-1].group_id
    for _ in range(4):
        core.finish_step(group_id)
    assert core.outputs["a"]
    worker_id = "chip0" if group_id == "g0" else "chip1"
    lose(core, worker_id)
    second_group_id, (admission,) = core.last_admissions()
    assert second_group_id != group_id
    assert admission.token_ids == (*range(6), *core.outputs["a"])
    assert admission.output_start == 6
    core.finish_all(second_group_id)
    assert core.outputs["a"] == reference(range(6), 12)
    assert core.core.snapshot(core.now).failovers == 1


@pytest.mark.parametrize(
    ("kind", "level"), [(LossKind.GOODBYE, LogLevel.INFO), (LossKind.STREAM, LogLevel.WARNING)]
)
@pytest.mark.parametrize("serves", [True, False])
def test_workers_that_leave_as_asked_are_nothing_to_warn_of(kind, level, serves) -> None:
    core = driven(1)
    (form,) = core.attach("chip0")
    if serves:
        core.make_ready(form)
    told = of_kind(core.handle(WorkerLost("chip0", 1, kind, "the control plane stops")), Log)
    assert {log.event for log in told} >= {"worker.lost", "group.epoch_ended"}
    assert {log.level for log in told} == {level}


def test_requests_wait_for_their_only_group_and_go_first() -> None:
    core = driven(1, running_max=1).serve()
    for name in "ab":
        core.submit(name, [ord(name), 1, 2], max_tokens=5)
    core.finish_step()
    effects = lose(core, "chip0")
    assert ServingChanged(()) in effects
    (form,) = core.attach("chip0", 2)
    assert form.epoch == 2
    core.make_ready(form)
    _, (admission,) = core.last_admissions()
    assert admission.token_ids[0] == ord("a")


def test_requests_of_a_group_that_never_comes_back_fail_in_time() -> None:
    core = driven(1, recovery_timeout_s=30.0).serve()
    core.submit("a", range(6))
    lose(core, "chip0")
    core.wait(29)
    assert not core.errors
    core.wait(1)
    assert isinstance(core.errors["a"], ServiceUnavailable)


def test_survivors_are_reset_and_a_new_process_takes_the_name_over() -> None:
    core = driven(2).serve()
    effects_before = len(core.effects)
    forms = core.attach("chip1", 2)
    effects = core.effects[effects_before:]
    assert of_kind(effects, DropWorker)[0].incarnation == 1
    assert [e.worker_id for e in of_kind(effects, ResetWorker)] == ["chip0"]
    assert [(f.worker_id, f.epoch) for f in forms] == [("chip0", 2), ("chip1", 2)]


def test_stale_events_change_nothing() -> None:
    core = driven(1).serve()
    core.submit("a", range(6), max_tokens=3)
    for event in (
        StepDone("chip0", 1, "g0", 0, 1, ()),
        StepDone("chip0", 9, "g0", 1, 1, ()),
        WorkerLost("chip0", 9, LossKind.STREAM, ""),
        Heartbeat("chip9", 1),
        WorkerFaulted("chip0", 1, 0, LossKind.DEVICE, ""),
    ):
        effects = core.handle(event)
        assert of_kind(effects, Log)
        assert {log.level for log in of_kind(effects, Log)} == {LogLevel.DEBUG}
    core.finish_all()
    assert core.outputs["a"] == reference(range(6), 3)


def test_a_result_out_of_order_ends_the_epoch() -> None:
    core = driven(1).serve()
    core.submit("a", range(6), max_tokens=3)
    effects = core.handle(StepDone("chip0", 1, "g0", 1, 5, ()))
    assert of_kind(effects, ResetWorker)
    (form,) = of_kind(effects, FormGroup)
    core.make_ready(form)
    core.finish_all()
    assert core.outputs["a"] == reference(range(6), 3)


def test_a_worker_of_no_group_is_forgotten_with_its_process() -> None:
    core = driven(1).serve()
    assert core.attach("stranger") == []
    assert state_of(core, "stranger") == "unused"
    lose(core, "stranger")
    core.attach("mute")
    for _ in range(9):
        core.wait(0.5)
        core.handle(Heartbeat("chip0", 1))
    assert [e.worker_id for e in of_kind(core.effects, Condemn)] == ["mute"]
    assert [w.worker_id for w in core.core.snapshot(core.now).workers] == ["chip0"]


def test_a_silent_worker_is_condemned_and_a_beating_one_is_not() -> None:
    core = driven(1, 1).serve()
    for _ in range(8):
        core.now += 0.5
        core.handle(Heartbeat("chip0", 1))
    effects = core.handle(Tick())
    assert [e.worker_id for e in of_kind(core.effects, Condemn)] == ["chip1"]
    assert [e.worker_id for e in of_kind(core.effects, DropWorker)] == ["chip1"]
    assert not of_kind(effects, Condemn)
    assert core.core.snapshot(core.now).groups[0].state == "serving"


def test_an_overdue_step_condemns_the_only_rank() -> None:
    core = driven(1, step_deadline_s=3.0, pipeline_depth=1).serve()
    core.submit("a", range(6))
    core.now += 2
    core.handle(Heartbeat("chip0", 1))
    core.now += 1
    effects = core.handle(Tick())
    assert of_kind(effects, Condemn)
    assert not core.errors


def test_a_group_not_formed_in_time_blames_the_late_rank() -> None:
    core = driven(2, formation_deadline_s=10.0)
    core.attach("chip0")
    forms = core.attach("chip1")
    core.handle(RendezvousOpened("chip0", 1, forms[0].epoch, b"here"))
    core.make_ready(forms[0])
    effects = core.wait(10)
    assert [e.worker_id for e in of_kind(effects, Condemn)] == ["chip1"]
    assert [e.worker_id for e in of_kind(effects, ResetWorker)] == ["chip0"]


def test_a_standstill_of_the_control_plane_is_held_against_nobody() -> None:
    core = driven(1, 2, step_deadline_s=3.0, formation_deadline_s=10.0).serve()
    core.submit("a", range(6), target_group="g0")
    lose(core, "chip1")
    forms = core.attach("chip1", 2)
    assert forms
    core.wait(2.0)
    core.now += 60.0
    assert not of_kind(core.handle(Tick()), Condemn)
    for worker_id, incarnation in (("chip0", 1), ("chip1", 2), ("chip2", 1)):
        core.handle(Heartbeat(worker_id, incarnation))
    assert not of_kind(core.wait(0.9), Condemn)
    core.finish_step()
    for form in forms:
        core.make_ready(form)
    states = [group.state for group in core.core.snapshot(core.now).groups]
    assert states == ["serving", "serving"]
    assert not core.errors


@pytest.mark.parametrize("stall_s", [0.0, 3.0, 10.0, 25.0])
@pytest.mark.parametrize("looked_at_s", [0.0, 3.4, 10.0])
def test_a_rank_silent_while_its_group_forms_has_its_full_allowance_once_it_serves(
    stall_s, looked_at_s
) -> None:
    core = driven(2)
    core.attach("chip0")
    first, last = core.attach("chip1")
    core.make_ready(first)
    core.wait(looked_at_s)
    core.now += stall_s
    assert not of_kind(core.make_ready(last), Condemn)
    assert core.core.snapshot(core.now).groups[0].state == "serving"
    assert not of_kind(core.wait(3.9), Condemn)
    assert of_kind(core.wait(0.2), Condemn)


@pytest.mark.parametrize("stall_s", [5.0, 10.0, 15.0, 100.0])
def test_a_standstill_while_a_group_forms_does_not_shorten_its_time(stall_s) -> None:
    core = driven(2, formation_deadline_s=20.0)
    core.attach("chip0")
    forms = core.attach("chip1")
    core.wait(4.0)
    core.now += stall_s
    core.handle(RendezvousOpened("chip0", 1, forms[0].epoch, b"here"))
    core.make_ready(forms[0])
    assert not of_kind(core.wait(15.9), Condemn)
    assert [e.worker_id for e in of_kind(core.wait(0.2), Condemn)] == ["chip1"]


@pytest.mark.parametrize("stall_s", [3.6, 4.0, 4.05, 4.3, 100.0])
@pytest.mark.parametrize("beats_count", range(8))
def test_a_worker_unheard_for_a_standstill_has_an_allowance_but_not_for_ever(
    stall_s, beats_count
) -> None:
    core = driven(1).serve()
    for _ in range(beats_count):
        core.wait(0.5)
        core.handle(Heartbeat("chip0", 1))
    core.now += stall_s
    # What arrived meanwhile may be handled before the tick, or after it.
    assert not of_kind(core.submit("a", range(6)), Condemn)
    assert not of_kind(core.handle(Tick()), Condemn)
    core.handle(Heartbeat("chip0", 1))
    assert not of_kind(core.wait(3.9), Condemn)
    assert of_kind(core.wait(0.2), Condemn)


def test_a_step_that_began_before_a_standstill_is_overdue_after_its_own_time() -> None:
    core = driven(1, step_deadline_s=3.0, pipeline_depth=1).serve()
    core.submit("a", range(6))
    core.wait(2.0)
    core.now += 50.0
    core.handle(Tick())
    assert not of_kind(core.wait(0.9), Condemn)
    assert of_kind(core.wait(0.2), Condemn)


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_a_request_that_no_group_can_hold_any_more_ends_at_once(max_tokens) -> None:
    core = driven(1, 1).serve()
    core.submit("a", range(20), max_tokens=max_tokens, target_group=None)
    group_id = core.plans[-1].group_id
    core.submit("small", range(5), max_tokens=4, target_group=group_id)
    first, other = ("chip0", "chip1") if group_id == "g0" else ("chip1", "chip0")
    core.finish_step(group_id)
    core.blocks = 15
    lose(core, other)
    for form in core.attach(other, 2):
        core.make_ready(form)
    lose(core, first)
    assert not core.errors, "its group may come back with more"
    for form in core.attach(first, 2):
        core.make_ready(form)
    assert list(core.errors) == ["a"]
    assert isinstance(core.errors["a"], WorkerFailure)
    most = 20 + (max_tokens or 236) - 1
    assert f"{most} tokens" in core.errors["a"].message
    assert "holds 60" in core.errors["a"].message
    assert "at most 40" in core.errors["a"].message


def test_three_own_faults_cordon_a_worker_but_three_kills_do_not() -> None:
    core = driven(1, 1)
    core.attach("chip0")
    core.attach("chip1")
    for incarnation in range(1, 4):
        core.now += 60
        for kind, name in ((LossKind.DEVICE, "chip0"), (LossKind.STREAM, "chip1")):
            core.handle(WorkerLost(name, incarnation, kind, "gone"))
            core.attach(name, incarnation + 1)
    assert state_of(core, "chip0") == "cordoned"
    assert state_of(core, "chip1") != "cordoned"
    core.now += 600
    assert core.attach("chip0", 5), "old faults are forgotten"


def test_a_request_present_at_two_deaths_runs_alone_and_fails_at_the_third() -> None:
    core = driven(1, running_max=4).serve()
    core.submit("a", range(6))
    core.submit("b", range(50, 56))
    for incarnation in (1, 2):
        lose(core, "chip0", incarnation)
        core.now += 5
        (form,) = core.attach("chip0", incarnation + 1) or of_kind(core.handle(Tick()), FormGroup)
        core.make_ready(form)
    assert core.core.snapshot(core.now).groups[0].running == 1
    assert not core.errors
    lose(core, "chip0", 3)
    assert list(core.errors) == ["a"]
    assert isinstance(core.errors["a"], WorkerFailure)


def test_an_idle_core_wakes_seldom() -> None:
    core = driven(1, 1).serve()
    wakes = 0
    due: float | None = min(e.when for e in of_kind(core.effects, WakeAt))
    for _ in range(200):
        core.now += 0.5
        for worker_id in ("chip0", "chip1"):
            effects = core.handle(Heartbeat(worker_id, 1))
        if due is not None and core.now >= due:
            effects = core.handle(Tick())
            wakes += 1
            due = None
        later = [e.when for e in of_kind(effects, WakeAt)]
        due = later[-1] if later else due
    assert wakes < 80
    assert all(g.state == "serving" for g in core.core.snapshot(core.now).groups)


def test_a_waiting_request_moves_to_a_group_that_becomes_free() -> None:
    core = driven(1, 1, running_max=1).serve()
    for i in range(6):
        core.submit(f"r{i}", [i, 1, 2, 3], max_tokens=20)
    core.finish_all("g1")
    assert core.core.snapshot(core.now).groups[1].waiting == 0
    finished = [name for name, outputs in core.outputs.items() if len(outputs) == 20]
    assert len(finished) >= 4, "g1 took over what waited for g0"
