"""Requests through the core: limits, admission, cache, retraction, pipelining, ends."""

from dataclasses import replace

import pytest

from control_plane.config import POLICIES, SchedulingConfig
from control_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    ServiceUnavailable,
)
from control_plane.scheduling.messages import (
    Accepted,
    Cancel,
    End,
    FlushCache,
    Submit,
    Tick,
    Tokens,
    WakeAt,
)
from tests.fakes.driven_core import DrivenCore, make_request, reference


def driven(blocks: int = 64, **changes) -> DrivenCore:
    values = {"block_tokens": 4, "chunk_tokens": 16, "running_max": 16, "digest_interval_steps": 1}
    return DrivenCore(SchedulingConfig(**(values | changes)), blocks).serve()


def cached_tokens(effects) -> list[int]:
    return [d.facts.cached_tokens for e in effects if isinstance(e, Tokens) for d in e.deltas]


def test_an_answer_is_the_undisturbed_one_and_leaves_empty_tables() -> None:
    core = driven()
    assert core.submit("r", range(10), max_tokens=6)[0] == Accepted("r", 6)
    core.finish_all()
    assert core.outputs["r"] == reference(range(10), 6)
    assert core.plans[-1].releases == (0,), "the last step only releases"
    assert not core.core._requests


@pytest.mark.parametrize("blocks_count", [2, 3, 4, 5])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("stops", [False, True])
def test_the_second_turn_finds_all_blocks_but_the_last_token(blocks_count, offset, stops) -> None:
    core = driven()
    prompt, output_count = list(range(5)), 4 * blocks_count + offset - 5
    core.submit("first", prompt, max_tokens=None if stops else output_count)
    while len(core.outputs.get("first", [])) < output_count:
        core.finish_step()
    if stops and core.in_flight():
        core.finish_step()  # A row computed after the end counts for nothing.
    core.handle(End("first", output_count))
    core.finish_all()
    second = [*prompt, *core.outputs["first"][:output_count], *range(100, 108)]
    core.submit("second", second, max_tokens=4)
    effects = [e for _ in range(4) if core.in_flight() for e in core.finish_step()]
    assert cached_tokens(effects)[0] == (4 * blocks_count + offset - 1) // 4 * 4
    core.finish_all()
    assert core.outputs["second"] == reference(second, 4)


def test_a_full_hit_gives_up_its_last_block() -> None:
    core = driven()
    core.submit("first", range(8), max_tokens=3)
    core.finish_all()
    core.submit("second", range(8), max_tokens=3)
    assert core.plans[-1].admissions[0].cached_count == 4
    core.finish_all()
    assert core.outputs["second"] == core.outputs["first"]


def test_without_the_cache_nothing_is_reused() -> None:
    core = driven()
    core.submit("first", range(12), max_tokens=2)
    core.finish_all()
    core.submit("second", range(12), max_tokens=2, use_prefix_cache=False)
    assert core.plans[-1].admissions[0].cached_count == 0


def test_the_same_uncached_prefix_is_computed_once() -> None:
    core = driven(running_max=4, chunk_tokens=8)
    for name in ("a", "b", "c"):
        core.submit(name, range(40), max_tokens=2)
    core.finish_all()
    prefilled = sum(r.tokens_count for plan in core.plans for r in plan.rows)
    assert prefilled <= 40 + 2 * 4 + 3 * 2
    assert all(core.outputs[name] == reference(range(40), 2) for name in ("a", "b", "c"))


def test_the_next_computes_a_prefix_whose_first_was_cancelled() -> None:
    core = driven(chunk_tokens=4)
    core.submit("a", range(20), max_tokens=2)
    core.submit("b", range(20), max_tokens=2)
    core.finish_step()
    core.handle(Cancel("a"))
    core.finish_all()
    assert isinstance(core.errors["a"], RequestCancelled)
    assert core.outputs["b"] == reference(range(20), 2)


def test_sixteen_requests_in_sixty_four_blocks_all_finish() -> None:
    core = driven(blocks=64, running_max=16, chunk_tokens=32)
    for i in range(16):
        core.submit(f"r{i}", [i, 1, 2, 3, 4, 5], max_tokens=60)
    first = core.core._requests["r0"]
    retractions: dict[str, int] = {}
    while core.in_flight():
        core.finish_step()
        for name, live in core.core._requests.items():
            retractions[name] = live.retractions
        core._end_complete()
    assert first.retractions == 0, "the oldest never gives way"
    assert 0 < max(retractions.values()) <= 5
    for i in range(16):
        assert core.outputs[f"r{i}"] == reference([i, 1, 2, 3, 4, 5], 60)
    drawn = sum(row.sampled for plan in core.plans for row in plan.rows)
    assert drawn == 16 * 60, "what was on its way at a retraction is accepted"
    blocks = core.core.snapshot(core.now).groups[0].blocks
    assert blocks.free + blocks.cached == blocks.total == 64
    core.handle(FlushCache())
    assert core.core.snapshot(core.now).groups[0].blocks.free == 64


def test_a_request_retracted_often_comes_back_with_everything_reserved() -> None:
    core = driven(blocks=20, retractions_before_reservation=1)
    for i in range(5):
        core.submit(f"r{i}", [i, 1, 2, 3], max_tokens=50)
    reserved = False
    while core.in_flight():
        core.finish_step()
        for live in core.core._requests.values():
            assert live.retractions <= 1
            if live.placement and live.placement.reserved:
                reserved = True
                assert live.placement.tables[0].end * 4 >= 53
        core._end_complete()
    assert reserved
    assert all(len(core.outputs[f"r{i}"]) == 50 for i in range(5))


def test_two_steps_are_in_flight_and_a_newcomer_is_in_the_next_planned() -> None:
    core = driven()
    core.submit("a", range(4), max_tokens=20)
    assert core.in_flight() == 2
    core.submit("b", range(50, 54), max_tokens=20)
    core.finish_step()
    assert core.plans[-1].admissions, "the step planned next has the newcomer"


def test_the_next_step_is_planned_as_late_as_the_model_allows() -> None:
    config = SchedulingConfig(block_tokens=4, running_max=4, plan_lead_s=0.004)
    core = DrivenCore(config, decode_step_s=0.1).serve()
    effects = core.submit("a", range(4), max_tokens=20)
    assert core.in_flight() == 1
    wakes = [effect.when for effect in effects if isinstance(effect, WakeAt)]
    assert wakes
    assert 100.09 < wakes[-1] < 100.15
    core.submit("b", range(50, 54), max_tokens=20)
    assert core.in_flight() == 1
    core.now = wakes[-1]
    core.handle(Tick())
    assert core.in_flight() == 2
    assert [a.token_ids for a in core.plans[-1].admissions] == [(50, 51, 52, 53)]


def test_no_row_is_planned_beyond_the_length() -> None:
    core = driven()
    core.submit("a", range(4), max_tokens=2)
    for _ in range(2):
        core.finish_step()
    assert core.in_flight() == 0
    assert len(core.outputs["a"]) == 2


def test_a_long_prompt_is_admitted_in_parts() -> None:
    core = driven(blocks=64, admission_tokens_max=10)
    core.submit("a", range(35), max_tokens=2)
    core.finish_all()
    assert core.outputs["a"] == reference(range(35), 2)
    assert sum(len(ids) for plan in core.plans for _, ids in plan.extensions) == 25


def test_a_resumed_request_goes_on_at_its_index() -> None:
    core = driven()
    known = reference(range(6), 5)
    core.outputs["a"] = known[:3]
    core.submit("a", range(6), max_tokens=5, output_ids=tuple(known[:3]))
    assert core.plans[0].admissions[0].output_start == 6
    core.finish_all()
    assert core.outputs["a"] == known


@pytest.mark.parametrize("changes", [{}, {"max_tokens": 14}])
def test_an_answer_that_is_complete_when_resumed_only_waits_for_its_end(changes) -> None:
    core = driven(blocks=5)
    known = tuple(reference(range(6), 14))
    assert core.submit("a", range(6), output_ids=known, **changes)[0] == Accepted("a", 14)
    assert not core.plans
    core.submit("b", range(6), max_tokens=2)
    core.handle(End("a", 14))
    core.finish_all()
    assert core.outputs == {"b": reference(range(6), 2)}
    assert not core.errors
    assert not core.core._requests
    core.submit("c", range(6), output_ids=(*known, 1))
    assert core.errors["c"].field == "resume_output_ids"
    assert str(core.errors["c"]).startswith("resume_output_ids: 15 tokens are more than the 14")


@pytest.mark.parametrize(
    ("prompt", "changes", "field"),
    [
        (range(256), {}, "prompt"),
        (range(6), {"max_tokens": 251}, "max_tokens"),
        (range(6), {"max_tokens": 1, "output_ids": (1, 2)}, "resume_output_ids"),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_field(prompt, changes, field) -> None:
    core = driven(blocks=1000)
    core.submit("bad", prompt, **changes)
    error = core.errors["bad"]
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    # The protocols put the client's own name of the field before the colon.
    assert error.message.startswith(f"{field}: ")
    assert core.in_flight() == 0


def test_memory_bounds_a_request_as_context_does() -> None:
    core = driven(blocks=5)
    assert core.submit("a", range(6))[0] == Accepted("a", 14)
    core.submit("b", range(6), max_tokens=15)
    assert "14" in str(core.errors["b"])
    core.finish_all()
    assert len(core.outputs["a"]) == 14


@pytest.mark.parametrize(
    ("request_id", "prompt", "changes"),
    [
        ("a", range(6), {}),
        ("b", [], {}),
        ("b", range(6), {"max_tokens": 0}),
        ("b", range(6), {"target_group": "g9"}),
        ("b", range(6), {"prompt_top_tokens": 0}),
    ],
)
def test_what_intake_never_submits_is_a_broken_promise(request_id, prompt, changes) -> None:
    core = driven()
    core.submit("a", range(6))
    with pytest.raises(AssertionError):
        core.submit(request_id, prompt, **changes)


def test_a_full_queue_refuses_with_a_hint() -> None:
    core = driven(queue_requests_max=2, running_max=1)
    for name in "abcd":
        core.submit(name, range(4), max_tokens=2)
    assert list(core.errors) == ["d"]
    assert isinstance(core.errors["d"], QueueFull)
    assert core.errors["d"].retry_after_s >= 1
    core.finish_all()
    assert set(core.outputs) == set("abc")


def test_nothing_is_accepted_before_a_group_serves() -> None:
    core = DrivenCore(SchedulingConfig())
    core.submit("a", range(4))
    assert isinstance(core.errors["a"], ServiceUnavailable)
    assert core.errors["a"].retry_after_s


def test_cancel_and_deadline_end_a_request_at_every_stage() -> None:
    core = driven(running_max=1)
    core.submit("running", range(4), max_tokens=20, deadline=101.0)
    core.submit("waiting", range(4), max_tokens=20)
    core.handle(Cancel("waiting"))
    core.handle(Cancel("waiting"))
    core.handle(Cancel("unknown"))
    core.now = 101.0
    core.handle(Tick())
    assert isinstance(core.errors["waiting"], RequestCancelled)
    assert isinstance(core.errors["running"], DeadlineExceeded)
    core.finish_all()
    assert core.core.snapshot(core.now).groups[0].blocks.referenced == 0


def test_a_row_that_is_not_finite_fails_its_request_only() -> None:
    core = driven()
    core.submit("good", range(4), max_tokens=4)
    core.submit("bad", range(50, 54), max_tokens=4)
    while core.in_flight() and not core.errors:
        core.finish_step(spoilt_slot=1)
    assert list(core.errors) == ["bad"]
    core.finish_all()
    assert core.outputs["good"] == reference(range(4), 4)


def test_priority_orders_the_queue_and_age_overrules_it() -> None:
    core = driven(running_max=1, ageing_s=2.0, policy="priority")
    core.submit("running", range(4), max_tokens=3)
    core.submit("low", range(10, 14), max_tokens=2, priority=0)
    core.submit("high", range(20, 24), max_tokens=2, priority=1)
    core.finish_all()
    assert list(core.outputs) == ["running", "high", "low"]
    core.outputs.clear()
    core.submit("running", range(4), max_tokens=3)
    core.submit("low", range(10, 14), max_tokens=2, priority=0)
    core.now += 2.5
    core.submit("high", range(20, 24), max_tokens=2, priority=1)
    core.finish_all()
    assert list(core.outputs) == ["running", "low", "high"]


def test_lpm_takes_the_longest_resident_prefix_first() -> None:
    core = driven(running_max=1, policy="lpm")
    core.submit("warm", range(12), max_tokens=2)
    core.finish_all()
    core.submit("running", range(60, 64), max_tokens=3)
    core.submit("cold", range(30, 42), max_tokens=2)
    core.submit("hit", range(12), max_tokens=2)
    core.finish_all()
    assert list(core.outputs) == ["warm", "running", "hit", "cold"]


@pytest.mark.parametrize("limit", [1, 16])
def test_of_a_thousand_at_once_exactly_the_limit_waits(limit) -> None:
    core = driven(queue_requests_max=limit, running_max=4, chunk_tokens=8)
    for i in range(1000):
        waiting = core.core.snapshot(core.now).waiting
        core.submit(f"r{i}", [i, i + 1, i + 2, i + 3], max_tokens=4)
        assert (f"r{i}" in core.errors) == (waiting == limit), i
    refused = list(core.errors.values())
    assert all(isinstance(error, QueueFull) for error in refused)
    assert all(1 <= error.retry_after_s <= 60 for error in refused)
    accepted = 1000 - len(refused)
    assert accepted == limit + core.core.snapshot(core.now).running
    core.finish_all()
    assert len(core.outputs) == accepted
    core.submit("later", range(4), max_tokens=2)
    core.finish_all()
    assert core.outputs["later"] == reference(range(4), 2)


def test_the_queue_is_bounded_in_tokens_too() -> None:
    core = driven(queue_tokens_max=100, running_max=1, chunk_tokens=8)
    for i in range(100):
        core.submit(f"r{i}", range(i, i + 30), max_tokens=2)
    queued = sum(load.queued_tokens for load in core.core._serving.load.groups.values())
    assert 70 < queued <= 100
    assert all("tokens wait" in str(error) for error in core.errors.values())
    core.finish_all()
    assert len(core.outputs) == 100 - len(core.errors)


@pytest.mark.parametrize("prompt_count", [3, 4, 37, 40, 43])
@pytest.mark.parametrize("group_sizes", [(1,), (1, 1)])
def test_choices_over_one_prompt_compute_it_once(prompt_count, group_sizes) -> None:
    core = driven(running_max=8, group_sizes=group_sizes)
    for choice in range(8):
        request = make_request(f"c/{choice}", range(prompt_count), max_tokens=5)
        sampling = replace(request.sampling, choice=choice)
        core.handle(Submit(replace(request, sampling=sampling)))
    for _ in range(100):
        for group in range(len(group_sizes)):
            if core.in_flight(f"g{group}"):
                core.finish_step(f"g{group}")
        core._end_complete()
    computed = sum(row.tokens_count for plan in core.plans for row in plan.rows)
    decodes, last_blocks, groups = 8 * 4, 8 * 4, len(group_sizes)
    assert computed <= groups * prompt_count + last_blocks + decodes
    assert {a.sampling.choice for plan in core.plans for a in plan.admissions} == set(range(8))
    for choice in range(8):
        assert core.outputs[f"c/{choice}"] == reference(range(prompt_count), 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hungry_request_gets_its_turn_among_many_small_ones(policy) -> None:
    """The small ones are shorter, more urgent, in part cached, and never stop coming."""
    core = driven(blocks=20, ageing_s=0.3, policy=policy)
    core.submit("first", range(300, 304), max_tokens=8)
    core.submit("hungry", range(60), max_tokens=12, priority=-5)
    small = steps = 0
    # The ageing time is 30 steps; then what runs may end.
    while "hungry" not in core.outputs and steps < 30 + 30:
        steps += 1
        while len(core.core._requests) < 12:
            small += 1
            core.submit(f"s{small}", [small % 5, 1, 2, 3, 4], max_tokens=6, priority=5)
        core.finish_step()
        core._end_complete()
    assert "hungry" in core.outputs
    core.finish_all()
    assert core.outputs["hungry"] == reference(range(60), 12)
    assert all(len(core.outputs[f"s{i}"]) == 6 for i in range(1, small + 1))


@pytest.mark.parametrize(
    ("waited_s", "priority", "passes"), [(0, 0, True), (0, -1, False), (3, 0, False)]
)
def test_who_fits_passes_who_lacks_blocks_until_that_has_aged(waited_s, priority, passes) -> None:
    core = driven(blocks=20, ageing_s=2.0, policy="priority")
    core.submit("first", range(300, 340), max_tokens=30)
    core.submit("large", range(60), max_tokens=4)
    core.now += waited_s
    core.submit("small", range(100, 104), max_tokens=2, priority=priority)
    while "small" not in core.outputs:
        core.finish_step()
        core._end_complete()
    assert (len(core.outputs["first"]) < 30) == passes, "the large one goes when the first is over"
    core.finish_all()
    assert core.outputs["large"] == reference(range(60), 4)
