"""Requests of models whose layers see a window: what they take, keep cached, share and wait for."""

import pytest

from control_plane.config import SchedulingConfig
from control_plane.scheduling.kv_groups import KVGroups
from control_plane.scheduling.messages import Accepted, Cancel, FlushCache
from tests.fakes.driven_core import DrivenCore, reference

BLOCK = 4
SYSTEM = range(500, 540)
"""Ten blocks; all windows here are shorter."""


def driven(windows: tuple[int, ...], blocks: int = 200, **changes) -> DrivenCore:
    values = {"chunk_tokens": 16, "running_max": 16, "digest_interval_steps": 1}
    config = SchedulingConfig(block_tokens=BLOCK, **(values | changes))
    return DrivenCore(config, blocks, kv_windows=windows).serve()


def forget_window_blocks(core: DrivenCore) -> None:
    """As if memory had been short of them."""
    serving = core.core._serving
    for residency in list(serving.schedulers["g0"].tree.residencies):
        serving._index.forget_window(residency)
    core.core.check_integrity()


def answered(core: DrivenCore, name: str, prompt, count: int = 4, **changes) -> int:
    """Runs a request to its end and returns how many of its tokens were cached."""
    core.submit(name, prompt, max_tokens=count, **changes)
    core.finish_all()
    assert core.outputs[name] == reference(prompt, count)
    return next(a.cached_count for p in reversed(core.plans) for a in p.admissions)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("windows", [(0, 8), (0, 6, 6), (8,)])
def test_a_long_prompt_needs_few_blocks_behind_a_window(windows) -> None:
    kv = KVGroups(windows, BLOCK, 16)
    core = driven(windows, blocks=kv.cost(240))
    answered(core, "long", range(200), 40)
    chip = core.last_chip()
    assert chip.windowed_blocks_most == max(kv.held_max(group) for group in kv.windowed) <= 9
    assert any(plan.drops for plan in core.plans)
    assert core.errors == {}


def test_what_memory_holds_is_counted_over_all_groups() -> None:
    core = driven((0, 8), blocks=20)
    assert core.submit("a", range(6))[0] == Accepted("a", 38)
    core.submit("b", range(6), max_tokens=39)
    assert "exceed the 44 that" in str(core.errors["b"])
    assert "at most 38" in str(core.errors["b"])
    core.submit("c", range(44))
    assert "no room for output in the 44" in str(core.errors["c"])
    core.finish_all()
    assert core.outputs["a"] == reference(range(6), 38), "the last block is used, too"


def test_with_windows_only_a_group_decodes_on_for_ever_without_retractions() -> None:
    kv = KVGroups((8,), BLOCK, 16)
    core = driven((8,), blocks=8 * kv.held_max(0), running_max=8)
    for i in range(8):
        core.submit(f"r{i}", [i, *range(20)], max_tokens=100)
    core.finish_all()
    assert all(core.outputs[f"r{i}"] == reference([i, *range(20)], 100) for i in range(8))
    assert core.core.snapshot(core.now).groups[0].retracted == 0


def test_who_shares_window_blocks_can_give_them_up_when_memory_is_full() -> None:
    """Of two that hold the same block, the first to give it up still gets another for it."""
    core = driven((24,), blocks=2 * KVGroups((24,), BLOCK, 16).held_max(0) + 1, running_max=3)
    core.submit("a", SYSTEM, max_tokens=60)
    while "a" not in core.outputs:
        core.finish_step()
    core.submit("b", [*SYSTEM, *range(30)], max_tokens=20)
    core.submit("c", range(8), max_tokens=60)
    core.finish_all()
    assert core.outputs["a"] == reference(SYSTEM, 60)
    assert core.outputs["b"] == reference([*SYSTEM, *range(30)], 20)


def test_a_prefill_keeps_the_room_it_was_admitted_with_while_its_rows_are_short() -> None:
    """Others come and take all that is free: then they decode, and its rows are long again."""
    core = driven((8,), blocks=KVGroups((8,), BLOCK, 16).held_max(0) + 4)
    core.submit("long", range(240), max_tokens=2)
    for i in range(20):
        core.submit(f"r{i}", [i] * 8, max_tokens=30)
    core.finish_all()
    assert core.outputs["long"] == reference(range(240), 2)
    rows = [row.tokens_count for plan in core.plans for row in plan.rows if row.slot == 0]
    shortest = rows.index(min(rows[:10]))
    assert rows[shortest] < 16 == rows[shortest + 2]


def test_who_may_grow_counts_a_block_in_every_group_whose_window_is_not_full() -> None:
    core = driven((0, 8, 24))
    core.submit("a", range(4), max_tokens=80)
    growths: list[int] = []
    scheduler = core.core._serving.schedulers["g0"]
    while scheduler.running:
        placement = scheduler.running[0].placement
        growths.append(scheduler.blocks.tables.growth(placement))
        core.finish_step()
        core._end_complete()
    assert growths[0] == 3
    assert sorted(set(growths)) == [1, 2, 3]
    assert growths == sorted(growths, reverse=True)


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("windows", [(0, 8), (0, 0, 14, 6), (9,)])
@pytest.mark.parametrize("blocks_count", [3, 5, 12])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_second_turn_finds_all_but_the_last_block(windows, blocks_count, offset) -> None:
    core = driven(windows)
    output_count = BLOCK * blocks_count + offset - 5
    answered(core, "first", range(5), output_count)
    second = [*range(5), *core.outputs["first"], *range(100, 108)]
    expected = (BLOCK * blocks_count + offset - 1) // BLOCK * BLOCK
    assert answered(core, "second", second) == expected


@pytest.mark.parametrize("windows", [(0, 8), (0, 6, 11), (7,)])
@pytest.mark.parametrize("chunk_tokens", [4, 16, 64])
def test_a_system_prompt_is_shared_though_it_is_longer_than_the_window(
    windows, chunk_tokens
) -> None:
    """It ends within a chunk that is longer than the window, too."""
    core = driven(windows, chunk_tokens=chunk_tokens)
    answered(core, "a", [*SYSTEM, *range(50)])
    assert answered(core, "b", [*SYSTEM, *range(100, 150)]) == 40


@pytest.mark.parametrize("windows", [(0, 8), (0, 6, 11), (7,)])
def test_it_is_still_shared_when_old_conversations_have_lost_their_window(windows) -> None:
    core = driven(windows, blocks=KVGroups(windows, BLOCK, 16).cost(70) + 12 * len(windows))
    turns = {i: [*SYSTEM, *range(20 * i, 20 * i + 14)] for i in range(12)}
    answered(core, "first", turns[0])
    for i in range(1, 12):
        assert answered(core, f"c{i}", turns[i]) == 40, i
    old_turn = [*turns[1], *core.outputs["c1"], 7, 8, 9]
    assert answered(core, "old", old_turn) == 40, "its own window is gone"
    recent_turn = [*turns[11], *core.outputs["c11"], 7, 8, 9]
    assert answered(core, "recent", recent_turn) == 56


@pytest.mark.parametrize("windows", [(0, 8), (0, 6, 11)])
def test_a_prefix_that_lost_its_window_is_computed_once_and_is_whole_again(windows) -> None:
    core = driven(windows)
    answered(core, "a", [*SYSTEM, *range(10)])
    forget_window_blocks(core)
    core.submit("b", [*SYSTEM, *range(20, 30)], max_tokens=4)
    core.submit("c", [*SYSTEM, *range(30, 40)], max_tokens=4)
    core.finish_all()
    cached = [a.cached_count for plan in core.plans for a in plan.admissions]
    assert cached == [0, 0, 40], "b computes it, c waits for it"
    assert core.outputs["c"] == reference([*SYSTEM, *range(30, 40)], 4)
    second = [*SYSTEM, *range(20, 30), *core.outputs["b"], 1, 2]
    assert answered(core, "b2", second) == 52, "its own tail was added at its end"


def test_a_prefix_is_made_whole_again_though_another_request_holds_it() -> None:
    core = driven((0, 8), chunk_tokens=64)
    core.submit("holds", [*SYSTEM, *range(10)], max_tokens=60)
    while len(core.outputs.get("holds", [])) < 30:
        core.finish_step()
    forget_window_blocks(core)
    core.submit("b", [*SYSTEM, *range(20, 30)], max_tokens=2)
    while "b" not in core.outputs:
        core.finish_step()
    core.submit("c", [*SYSTEM, *range(30, 40)], max_tokens=2)
    core.finish_step()
    cached = [a.cached_count for plan in core.plans for a in plan.admissions]
    assert cached == [0, 0, 40]
    core.finish_all()
    assert core.outputs["holds"] == reference([*SYSTEM, *range(10)], 60)


def test_at_its_end_a_request_gives_what_is_missing_where_it_lost_its_way() -> None:
    core = driven((0, 8))
    answered(core, "a", SYSTEM, 8)
    forget_window_blocks(core)
    core.submit("b", SYSTEM, max_tokens=48)
    while len(core.outputs.get("b", [])) < 5:
        core.finish_step()
    core.handle(FlushCache())  # The places beside which it went are gone.
    longer = [*SYSTEM, *reference(SYSTEM, 44)]
    core.submit("c", longer, max_tokens=1)
    while "c" not in core.outputs:
        core.finish_step()
    core._end_complete()
    forget_window_blocks(core)
    core.finish_all()
    assert core.outputs["b"] == reference(SYSTEM, 48)
    assert answered(core, "again", [*longer, 1, 2, 3]) == 84


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_request_with_a_failed_row_wrote_is_not_found_again(is_first: bool) -> None:
    core = driven((0, 8))
    if not is_first:
        answered(core, "first", SYSTEM)
        forget_window_blocks(core)
    core.submit("bad", [*SYSTEM, *range(9)], max_tokens=9)
    while core.in_flight() and "bad" not in core.errors:
        core.finish_step(spoilt_slot=0)
    core.finish_all()
    tree = core.core._serving.schedulers["g0"].tree
    assert len(tree.residencies) == (0 if is_first else 10)
    assert all(residency.block_ids[1] is None for residency in tree.residencies)
    assert answered(core, "next", [*SYSTEM, *range(9)]) == 0


def test_a_request_with_a_failed_row_leaves_what_it_only_read() -> None:
    core = driven((0, 8))
    answered(core, "first", [*SYSTEM, *range(9)])
    core.submit("bad", [*SYSTEM, *range(20, 29)], max_tokens=9)
    while "bad" not in core.errors:
        core.finish_step(spoilt_slot=0)
    core.finish_all()
    assert answered(core, "next", [*SYSTEM, *range(30, 39)]) == 40


@pytest.mark.parametrize("how", ["evicted", "flushed"])
def test_nor_is_it_where_the_last_place_that_it_passed_is_gone(how: str) -> None:
    """Those above, which another request holds, have what the failed one wrote."""
    core = driven((0, 8))
    answered(core, "first", SYSTEM)
    core.submit("holds", [*SYSTEM[:36], *range(10)], max_tokens=90)
    while len(core.outputs.get("holds", [])) < 30:
        core.finish_step()
    forget_window_blocks(core)
    core.submit("bad", [*SYSTEM, *range(40)], max_tokens=9)
    bad = core.core._requests["bad"]
    while not (bad.placement and bad.placement.beside and bad.placement.beside.depth == 10):
        core.finish_step()
    passed = bad.placement.beside
    if how == "flushed":
        core.handle(FlushCache())
    else:
        core.core._serving._index.forget(passed)
    assert not passed.alive
    assert passed.parent.alive
    assert passed.parent.block_ids[1] is not None
    while "bad" not in core.errors:
        core.finish_step(spoilt_slot=bad.placement.slot)
    core.core.check_integrity()
    assert all(place.block_ids[1] is None for place in passed.parent.chain())
    assert answered(core, "next", [*SYSTEM[:36], *range(50, 60)]) == 0


def test_who_waits_does_not_count_on_window_blocks_that_are_gone_by_its_turn() -> None:
    core = driven((0, 8), running_max=1)
    answered(core, "first", [*SYSTEM, *range(9)])
    core.submit("runs", [7] * 30, max_tokens=9)
    core.submit("waits", [*SYSTEM, *range(20, 29)], max_tokens=3)
    waits = core.core._requests["waits"]
    blocks = core.core._serving.schedulers["g0"].blocks
    assert [blocks.matched_tokens(waits) for _ in range(2)] == [40, 40]
    forget_window_blocks(core)
    assert blocks.matched_tokens(waits) == 0
    core.finish_all()
    assert core.outputs["waits"] == reference([*SYSTEM, *range(20, 29)], 3)


def test_a_cancelled_request_leaves_what_it_computed() -> None:
    core = driven((0, 8))
    core.submit("a", range(60), max_tokens=40)
    while len(core.outputs.get("a", [])) < 3:
        core.finish_step()
    core.handle(Cancel("a"))
    core.finish_all()
    assert answered(core, "b", [*range(60), *core.outputs["a"], 5]) == 60


# ---------------------------------------------------------------- groups of chips


def test_chips_of_a_group_must_agree_on_the_windows() -> None:
    core = DrivenCore(SchedulingConfig(group_sizes=(2,), block_tokens=BLOCK), kv_windows=(0, 8))
    core.attach("chip0")
    (form,) = core.attach("chip1", kv_windows=(0, 9))
    assert form.worker_id == "chip0"
    states = {w.worker_id: w.state for w in core.core.snapshot(core.now).workers}
    assert states == {"chip0": "forming", "chip1": "mismatched"}


@pytest.mark.parametrize(("is_whole", "chosen"), [(True, "g0"), (False, "g1")])
def test_a_prefix_draws_a_request_to_a_group_only_if_it_is_of_use_there(is_whole, chosen) -> None:
    core = driven((0, 8), group_sizes=(1, 1))
    answered(core, "a", SYSTEM, 2, target_group="g0")
    if not is_whole:
        forget_window_blocks(core)
    core.submit("z", range(600, 640), max_tokens=2, target_group="g1")  # So both are measured.
    core.finish_all("g1")
    core.submit("busy", range(20), max_tokens=9, target_group="g0")
    core.submit("b", [*SYSTEM, *range(10)], max_tokens=2)
    assert core.core._requests["b"].group_id == chosen
