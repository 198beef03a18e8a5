"""Groups that start, and start again, without chips that fail; and rows no chip can take."""

import pytest

from control_plane.config import SchedulingConfig
from control_plane.scheduling.group_epochs import GROUP_FEWER_CHIPS, GROUP_ROWS_CLAMPED
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
    WorkerFaulted,
    WorkerLost,
)
from tests.fakes.driven_core import DrivenCore, reference

GATHER_S = 1.0


def driven(*sizes: int, **changes) -> DrivenCore:
    return DrivenCore(SchedulingConfig(group_sizes=sizes, block_tokens=4, **changes))


def of_kind(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def places(effects) -> list[tuple[str, int, int]]:
    """(worker, rank, world size) of whoever is told to form."""
    return [(f.worker_id, f.rank, f.world_size) for f in of_kind(effects, FormGroup)]


def worker(core: DrivenCore, worker_id: str):
    workers = core.core.snapshot(core.now).workers
    return next(each for each in workers if each.worker_id == worker_id)


def group(core: DrivenCore, index: int = 0):
    return core.core.snapshot(core.now).groups[index]


def warnings(core: DrivenCore, event: str) -> list[dict[str, object]]:
    logs = [log for log in of_kind(core.effects, Log) if log.event == event]
    assert all(log.level is LogLevel.WARNING for log in logs)
    return [log.fields for log in logs]


def fault(core, worker_id, epoch, kind=LossKind.DEVICE, incarnation=1, exiting=False):
    return core.handle(WorkerFaulted(worker_id, incarnation, epoch, kind, "it broke", exiting))


def beat(core: DrivenCore, seconds: float, *worker_ids: str):
    """Time passes while these workers live."""
    effects = []
    for _ in range(int(seconds * 2)):
        effects += core.wait(0.5)
        for worker_id in worker_ids:
            effects += core.handle(Heartbeat(worker_id, worker(core, worker_id).incarnation))
    return effects


# ---------------------------------------------------------------- chips that cannot be opened


def test_a_group_forms_without_a_chip_that_could_not_be_opened() -> None:
    core = driven(3)
    core.attach("chip1", unavailable_reason="no such chip")
    assert core.attach("chip0") == []
    assert places(core.attach("chip2")) == [("chip0", 0, 2), ("chip2", 1, 2)]
    assert (worker(core, "chip1").state, worker(core, "chip1").reason) == (
        "unavailable",
        "no such chip",
    )
    (said,) = warnings(core, GROUP_FEWER_CHIPS)
    assert said["missing"] == {"chip1": "no such chip"}
    assert group(core).worker_ids == ("chip0", "chip2")


def test_its_leaving_changes_nothing() -> None:
    core = driven(2)
    core.attach("chip1", unavailable_reason="no such chip")
    core.make_ready_all(core.attach("chip0"))
    assert not core.handle(WorkerLost("chip1", 1, LossKind.GOODBYE, "left"))[:-1]
    assert worker(core, "chip1").state == "unavailable"
    assert group(core).state == "serving"


def test_a_group_without_any_chip_waits() -> None:
    core = driven(2)
    for worker_id in ("chip0", "chip1"):
        assert core.attach(worker_id, unavailable_reason="no driver") == []
    core.wait(1000)
    assert group(core).state == "waiting"
    assert places(core.attach("chip1", 2)) == [("chip1", 0, 1)]


def test_without_rank_zero_the_next_worker_leads() -> None:
    core = driven(3)
    core.attach("chip0", unavailable_reason="burnt")
    core.attach("chip1")
    forms = core.attach("chip2")
    relayed = core.handle(RendezvousOpened("chip1", 1, forms[0].epoch, b"here"))
    assert [e.worker_id for e in of_kind(relayed, SendRendezvous)] == ["chip2"]
    core.make_ready_all(forms)
    core.submit("a", range(6), max_tokens=5)
    core.finish_all()
    assert core.outputs["a"] == reference(range(6), 5)


def test_a_chip_that_works_again_takes_part_from_the_next_formation_on() -> None:
    core = driven(2)
    core.attach("chip1", unavailable_reason="busy")
    core.make_ready_all(core.attach("chip0"))
    assert core.attach("chip1", 2) == []
    assert (worker(core, "chip1").state, worker(core, "chip1").reason) == ("idle", "")
    assert group(core).state == "serving"
    effects = core.handle(WorkerFaulted("chip0", 1, group(core).epoch, LossKind.PEER, "lost"))
    assert places(effects) == [("chip0", 0, 2), ("chip1", 1, 2)]


@pytest.mark.parametrize("how", ["lost", "superseded", "silent"])
def test_what_happens_to_a_worker_outside_the_epoch_does_not_end_it(how) -> None:
    core = driven(2)
    core.attach("chip1", unavailable_reason="busy")
    core.make_ready_all(core.attach("chip0"))
    core.attach("chip1", 2)
    epoch = group(core).epoch
    if how == "lost":
        core.handle(WorkerLost("chip1", 2, LossKind.STREAM, "killed"))
    elif how == "superseded":
        core.attach("chip1", 3)
    else:
        assert [e.worker_id for e in of_kind(beat(core, 6, "chip0"), Condemn)] == ["chip1"]
    assert (group(core).state, group(core).epoch) == ("serving", epoch)


def test_a_chip_that_could_not_be_opened_three_times_is_cordoned() -> None:
    core = driven(2)
    for incarnation in range(1, 4):
        core.attach("chip1", incarnation, unavailable_reason="no")
        core.now += 10
    core.attach("chip1", 4)
    assert worker(core, "chip1").state == "cordoned"
    assert places(core.attach("chip0")) == [("chip0", 0, 1)]


def test_switched_off_a_group_waits_for_all_its_chips() -> None:
    core = driven(2, fewer_chips=False)
    core.attach("chip1", unavailable_reason="no")
    assert core.attach("chip0") == []
    assert not of_kind(beat(core, 200, "chip0"), FormGroup)
    assert places(core.attach("chip1", 2)) == [("chip0", 0, 2), ("chip1", 1, 2)]


@pytest.mark.parametrize("odd", range(3))
def test_a_worker_with_another_model_is_left_out(odd) -> None:
    core = driven(3)
    effects = []
    for index in range(3):
        digest = "other" if index == odd else "d"
        effects += core.attach(f"chip{index}", model_digest=digest)
    others = [f"chip{index}" for index in range(3) if index != odd]
    assert places(effects) == [(others[0], 0, 2), (others[1], 1, 2)]
    assert worker(core, f"chip{odd}").state == "mismatched"
    assert "model digest" in warnings(core, GROUP_FEWER_CHIPS)[0]["missing"][f"chip{odd}"]
    core.make_ready_all(effects)
    assert core.attach(f"chip{odd}", 2, model_digest="d") == []
    effects = fault(core, others[0], group(core).epoch, LossKind.PEER)
    assert len(places(effects)) == 3, "the right one takes part from the next formation on"


# ---------------------------------------------------------------- chips that do not come


def test_who_does_not_come_is_waited_for_until_the_start_deadline() -> None:
    core = driven(2, start_deadline_s=20.0)
    core.attach("chip0")
    assert not of_kind(beat(core, 19, "chip0"), FormGroup)
    assert places(beat(core, 2, "chip0")) == [("chip0", 0, 1)]
    assert "20 s" in warnings(core, GROUP_FEWER_CHIPS)[0]["missing"]["chip1"]


def test_who_never_came_is_not_waited_for_again() -> None:
    core = driven(3, start_deadline_s=20.0)
    core.attach("chip0")
    core.attach("chip1")
    core.make_ready_all(beat(core, 21, "chip0", "chip1"))
    core.handle(WorkerLost("chip1", 1, LossKind.STREAM, "killed"))
    assert places(core.attach("chip1", 2)) == [("chip0", 0, 2), ("chip1", 1, 2)]


def test_the_deadline_begins_with_the_first_that_is_there() -> None:
    core = driven(2, start_deadline_s=20.0)
    core.wait(60)
    core.attach("chip0")
    core.handle(WorkerLost("chip0", 1, LossKind.STREAM, "killed"))
    core.wait(60)
    core.attach("chip0", 2)
    assert not of_kind(beat(core, 19, "chip0"), FormGroup)
    assert places(beat(core, 2, "chip0")) == [("chip0", 0, 1)]


# ---------------------------------------------------------------- chips that fail while forming


def forming(*sizes: int, **changes):
    core = driven(*sizes, **changes)
    forms = [form for k in range(sum(sizes)) for form in core.attach(f"chip{k}")]
    core.handle(RendezvousOpened("chip0", 1, forms[0].epoch, b"here"))
    return core, forms


def test_a_chip_that_fails_while_its_group_forms_is_left_out() -> None:
    core, forms = forming(3)
    core.make_ready(forms[0])
    effects = fault(core, "chip1", forms[0].epoch)
    assert [e.worker_id for e in of_kind(effects, DropWorker)] == ["chip1"]
    assert worker(core, "chip1").reason == "it broke"
    effects = core.wait(GATHER_S)
    assert [e.worker_id for e in of_kind(effects, ResetWorker)] == ["chip0", "chip2"]
    assert places(effects) == [("chip0", 0, 2), ("chip2", 1, 2)]
    core.make_ready_all(effects)
    assert group(core).state == "serving"


def test_a_group_does_not_serve_without_a_rank_that_just_failed() -> None:
    core, forms = forming(2)
    core.make_ready(forms[0])
    fault(core, "chip0", forms[0].epoch)
    core.make_ready(forms[1])
    assert group(core).state == "forming"
    assert places(core.wait(GATHER_S)) == [("chip1", 0, 1)]


def test_a_victim_that_speaks_first_is_not_blamed() -> None:
    core, forms = forming(3)
    fault(core, "chip0", forms[0].epoch, LossKind.PEER)
    fault(core, "chip2", forms[0].epoch)
    effects = fault(core, "chip1", forms[0].epoch, LossKind.PEER)
    assert places(effects) == [("chip0", 0, 2), ("chip1", 1, 2)], "all have spoken"
    assert not of_kind(core.effects, Condemn)


def test_what_all_chips_fail_at_leaves_none() -> None:
    core, forms = forming(3)
    for form in forms:
        fault(core, form.worker_id, form.epoch, LossKind.MODEL, exiting=True)
    assert not of_kind(core.wait(GATHER_S + 30), FormGroup)
    assert {worker(core, f"chip{k}").state for k in range(3)} == {"unavailable"}


@pytest.mark.parametrize("kind", [LossKind.STREAM, LossKind.GOODBYE])
def test_a_process_that_ends_while_its_group_forms_is_left_out(kind) -> None:
    core, _ = forming(2)
    core.handle(WorkerLost("chip1", 1, kind, "gone"))
    assert "gone" in worker(core, "chip1").reason
    assert places(core.wait(GATHER_S)) == [("chip0", 0, 1)]
    assert core.core._chips.workers.is_cordoned("chip1", core.now) is False


def test_a_stream_that_only_broke_is_back_in_time() -> None:
    core, _ = forming(2)
    core.handle(WorkerLost("chip1", 1, LossKind.STREAM, "cut"))
    core.wait(0.3)
    core.attach("chip1", 1)
    assert places(core.wait(GATHER_S)) == [("chip0", 0, 2), ("chip1", 1, 2)]


def test_a_process_that_ends_because_it_hangs_is_to_blame_whatever_became_of_its_epoch() -> None:
    core, forms = forming(3, formation_deadline_s=10.0)
    again = of_kind(beat(core, 11, "chip0", "chip1", "chip2"), FormGroup)
    assert len(again) == 3, "nobody knows yet who is to blame"
    fault(core, "chip2", forms[0].epoch, exiting=True)
    core.handle(WorkerLost("chip2", 1, LossKind.GOODBYE, "hung"))
    assert places(core.wait(GATHER_S + 1)) == [("chip0", 0, 2), ("chip1", 1, 2)]
    assert worker(core, "chip2").state == "unavailable"


def test_a_worker_that_has_served_gets_another_chance() -> None:
    core = driven(2).serve()
    core.handle(WorkerFaulted("chip0", 1, group(core).epoch, LossKind.PEER, "lost"))
    fault(core, "chip1", group(core).epoch)
    assert places(core.wait(GATHER_S + 1)) == [("chip0", 0, 2), ("chip1", 1, 2)]
    assert not of_kind(core.effects, DropWorker)


def test_who_has_served_and_dies_is_not_put_into_the_next_epoch() -> None:
    core = driven(2).serve()
    effects = fault(core, "chip1", group(core).epoch, exiting=True)
    assert worker(core, "chip1").state == "lost"
    assert [e.worker_id for e in of_kind(effects, ResetWorker)] == ["chip0"]
    core.handle(WorkerLost("chip1", 1, LossKind.GOODBYE, "its chip is lost"))
    assert not of_kind(core.effects, DropWorker)
    effects += beat(core, 2, "chip0")
    assert not of_kind(effects, FormGroup)
    assert places(core.attach("chip1", 2)) == [("chip0", 0, 2), ("chip1", 1, 2)]


def test_who_dies_and_is_of_no_group_is_forgotten() -> None:
    core = driven(1)
    core.attach("chip7")
    fault(core, "chip7", 0, LossKind.PEER, exiting=True)
    assert not [each for each in core.core.snapshot(core.now).workers if each.worker_id == "chip7"]


def test_a_process_that_registers_again_has_still_served() -> None:
    core = driven(2).serve()
    core.handle(WorkerLost("chip1", 1, LossKind.STREAM, "cut"))
    assert places(core.attach("chip1", 1)) == [("chip0", 0, 2), ("chip1", 1, 2)]
    fault(core, "chip1", group(core).epoch)
    assert places(core.wait(GATHER_S + 1)) == [("chip0", 0, 2), ("chip1", 1, 2)], "another chance"
    core.attach("chip1", 2)
    core.wait(GATHER_S + 5)
    fault(core, "chip1", group(core).epoch, incarnation=2)
    assert worker(core, "chip1").state == "unavailable", "a new process has not"


def test_a_cordoned_chip_of_a_serving_group_is_left_out() -> None:
    core = driven(2).serve()
    for _ in range(3):
        effects = fault(core, "chip1", group(core).epoch)
        core.make_ready_all(effects + beat(core, 5, "chip0", "chip1"))
    assert worker(core, "chip1").state == "cordoned"
    assert (group(core).state, group(core).worker_ids) == ("serving", ("chip0",))
    assert "cordoned" in warnings(core, GROUP_FEWER_CHIPS)[0]["missing"]["chip1"]


# ---------------------------------------------------------------- rows


def test_a_group_runs_no_more_requests_than_its_weakest_chip_takes() -> None:
    core = driven(2, running_max=64)
    core.attach("chip0", rows_max=100)
    forms = core.attach("chip1", rows_max=8, device="weak")
    assert [form.slots for form in forms] == [8, 8]
    core.make_ready_all(forms)
    for index in range(9):
        core.submit(f"r{index}", [index, 1], max_tokens=4)
    core.finish_step()
    assert (group(core).running, group(core).waiting) == (8, 1)
    core.finish_all()
    assert core.outputs["r8"] == reference([8, 1], 4)
    (said,) = warnings(core, GROUP_ROWS_CLAMPED)
    expected = {"worker": "chip1", "device": "weak", "rows_max": 8, "setting": "--max-running"}
    assert said.items() >= expected.items()


@pytest.mark.parametrize("rows_max", [0, 4, 65536])
def test_a_limit_that_is_not_reached_changes_nothing(rows_max) -> None:
    core = driven(1, running_max=4)
    (form,) = core.attach("chip0", rows_max=rows_max)
    assert form.slots == 4
    assert not warnings(core, GROUP_ROWS_CLAMPED)
