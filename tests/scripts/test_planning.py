"""Layouts, what they hold, how fast they may be and which is advised: pure functions of shapes."""

from dataclasses import replace

import pytest

from chip_worker.model_config import ModelConfig, RopeConfig
from chip_worker.tensor_parallel import plan_shard
from control_plane.scheduling.step_time import StepWork, context_of_chunk
from scripts.calibration.calibration_file import CalibratedSettings, Calibration, Point, StepTime
from scripts.planning.capacity import Wishes, capacity
from scripts.planning.layouts import Layout, layouts
from scripts.planning.needs import Chips, GroupNeeds, ModelNeeds, RankNeeds, merged
from scripts.planning.plan import make_plan, shortage_of
from scripts.planning.report import advice_lines, plan_lines, shortage_lines, size_text
from scripts.planning.speed import speed, why_useless

GIB = 1 << 30
BLOCK_TOKENS = 16
HEAD_BYTES = 1 << 16
"""Of a KV head in a block, in these tests."""


def chips(count=8, gib=24.0, **changes):
    fields = {"backend": "cpu", "at_hand": True, "shared": False, "description": "cores 0"}
    return Chips(**(fields | {"count": count, "free_bytes": int(gib * GIB)} | changes))


def wishes(context=4096, running=32, requests=1, chunk=512):
    return Wishes(context, BLOCK_TOKENS, chunk, running, requests)


def model(weight_gib=14.0, query_heads=32, kv_heads=8, sizes=(1, 2, 4, 8), windows=(0,)):
    """A model whose weights go by query heads, and whose KV heads go as the worker splits them."""
    config = ModelConfig(
        architecture="llama",
        layers_count=1,
        hidden_size=1024,
        intermediate_size=4096,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=64,
        vocabulary_size=32000,
        context_tokens=8192,
        norm_epsilon=1e-5,
        rope=RopeConfig("default", 1e4, 64),
        tied_embeddings=False,
    )

    def rank_needs(rank, size, policy):
        shard = plan_shard(config, rank, size, policy)
        share = len(shard.query_heads) / query_heads
        heads = len(shard.kv_heads)
        return RankNeeds(
            int(weight_gib * GIB * share), heads * HEAD_BYTES, len(shard.query_heads), heads
        )

    groups = []
    for size in sizes:
        policies = ("cover", "replicate", *(("shard",) if size <= kv_heads else ()))
        groups += merged(
            GroupNeeds((policy,), tuple(rank_needs(rank, size, policy) for rank in range(size)))
            for policy in policies
        )
    return ModelNeeds("llama", "digest", "bfloat16", "auto", 8192, windows, tuple(groups))


def held(planned, size, policy="cover"):
    found = (row.held for row in planned.rows)
    return next(x for x in found if x.layout.size == size and policy in x.needs.policies)


# ---------------------------------------------------------------- layouts and needs


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [(1, 1, 0)]),
        (2, [(2, 1, 0), (1, 2, 0)]),
        (6, [(6, 1, 0), (3, 2, 0), (2, 3, 0), (1, 4, 2), (1, 6, 0)]),
        (7, [(7, 1, 0), (3, 2, 1), (1, 4, 3), (1, 7, 0)]),
    ],
)
def test_layouts_divide_the_chips_or_are_powers_of_two(count, expected):
    assert [(each.groups, each.size, each.left_over) for each in layouts(count)] == expected


def test_policies_that_come_to_the_same_are_one_row():
    needs = model(kv_heads=8)
    assert [each.policies for each in needs.of_size(1)] == [("cover", "replicate", "shard")]
    assert [each.policies for each in needs.of_size(2)] == [("cover", "shard"), ("replicate",)]


def test_nine_heads_of_three_groups_differ_under_every_policy_of_two_chips():
    needs = model(query_heads=9, kv_heads=3, sizes=(1, 2))
    found = {each.policies: each for each in needs.of_size(2)}
    assert set(found) == {("cover",), ("replicate",), ("shard",)}
    heads = {policies: [r.kv_heads for r in each.ranks] for policies, each in found.items()}
    assert heads == {("cover",): [2, 2], ("replicate",): [3, 3], ("shard",): [2, 1]}


# ---------------------------------------------------------------- capacity


def test_a_chip_of_its_own_memory_takes_a_fifth_of_what_weights_leave():
    asked = wishes(context=4096, running=32)
    needs = model(weight_gib=14.0).of_size(1)[0]
    found = capacity(Layout(8, 1, 0), needs, chips(gib=24.0), asked.kv_groups((0,)), asked)
    # 10 GiB are free: a quarter of it, less a fifth of that, is 2 GiB; a block has 8 heads.
    block_bytes = 8 * HEAD_BYTES
    assert found.blocks == 2 * GIB // block_bytes
    assert found.tokens == found.blocks * BLOCK_TOKENS
    assert found.requests == found.blocks // 256
    assert found.token_bytes == block_bytes // BLOCK_TOKENS
    assert found.left_bytes == 8 * GIB
    # All that 32 requests can want, which four fifths of 10 GiB hold.
    assert found.blocks_most == 32 * 256


def test_no_more_blocks_are_taken_than_running_requests_can_want():
    asked = wishes(context=4096, running=4)
    needs = model(weight_gib=14.0).of_size(1)[0]
    found = capacity(Layout(8, 1, 0), needs, chips(), asked.kv_groups((0,)), asked)
    assert found.blocks == found.blocks_most == 4 * 256
    assert found.requests == 4


def test_chips_that_share_a_memory_count_every_worker_and_every_copy():
    asked = wishes(running=10_000)
    needs = model(weight_gib=4.0).of_size(1)[0]
    shared = chips(count=2, gib=24.0, shared=True, process_bytes=GIB)
    found = capacity(Layout(2, 1, 0), needs, shared, asked.kv_groups((0,)), asked)
    # One worker is there, the second and two copies are to come.
    free = (24 - 1 - 2 * 4) * GIB
    assert found.blocks == int(free * 0.25 / 2 * 0.8) // (8 * HEAD_BYTES)
    # A group of two holds one copy, each chip half the heads of a block.
    pair = model(weight_gib=4.0).of_size(2)[0]
    found = capacity(Layout(1, 2, 0), pair, shared, asked.kv_groups((0,)), asked)
    assert found.blocks == int((24 - 1 - 4) * GIB * 0.25 / 2 * 0.8) // (4 * HEAD_BYTES)


def test_the_chip_that_holds_the_most_bounds_the_group():
    asked = wishes(running=100_000)
    # 9 heads over 2 chips: 5 and 4.
    needs = model(weight_gib=18.0, query_heads=9, kv_heads=3, sizes=(1, 2)).of_size(2)[0]
    found = capacity(Layout(1, 2, 0), needs, chips(2, 12.0), asked.kv_groups((0,)), asked)
    free = 12 * GIB - needs.ranks[0].weight_bytes
    assert needs.ranks[0].weight_bytes == 10 * GIB
    assert found.blocks == int(free * 0.25 * 0.8) // (2 * HEAD_BYTES)


def test_a_window_bounds_what_a_long_request_takes():
    asked = wishes(context=8192, running=4, chunk=64)
    needs = model(windows=(0, 512)).of_size(1)[0]
    found = capacity(Layout(1, 1, 0), needs, chips(1), asked.kv_groups((0, 512)), asked)
    block_bytes = 8 * HEAD_BYTES
    assert found.token_bytes == block_bytes // BLOCK_TOKENS
    # Behind the window: its own blocks, a chunk's, and some slack, but not 512 blocks.
    behind_window = asked.kv_groups((0, 512)).held_max(1)
    assert found.window_bytes == behind_window * block_bytes
    assert behind_window < 512 // BLOCK_TOKENS + 64 // BLOCK_TOKENS + 5
    assert found.blocks == 4 * (512 + behind_window)
    assert found.requests == 4
    assert found.tokens == 4 * 8192


def test_what_is_missing_is_just_enough():
    asked = wishes(context=8192)
    needs = model(weight_gib=14.0).of_size(1)[0]
    groups = asked.kv_groups((0,))
    small = chips(1, gib=13.0)
    found = capacity(Layout(1, 1, 0), needs, small, groups, asked)
    assert not found.can_serve
    assert found.left_bytes < 0
    enough = replace(small, free_bytes=small.free_bytes + found.missing_bytes)
    assert capacity(Layout(1, 1, 0), needs, enough, groups, asked).can_serve
    short = replace(enough, free_bytes=enough.free_bytes - 8 * HEAD_BYTES)
    assert not capacity(Layout(1, 1, 0), needs, short, groups, asked).can_serve


# ---------------------------------------------------------------- advice


@pytest.mark.parametrize(
    ("weight_gib", "size"),
    [
        (4.0, 1),
        (23.0, 1),  # One chip is full, but holds the request.
        (23.9, 2),  # P/M is below 1, and one chip has no room for the request.
        (47.0, 2),
        (48.0, 4),  # P/M is 2: two chips would hold weights alone.
        (60.0, 4),  # P/M is 2.5.
        (95.9, 8),
    ],
)
def test_the_rule_of_model_size_over_chip_memory(weight_gib, size):
    planned = make_plan(model(weight_gib), chips(), wishes(), None)
    assert planned.advice.taken.layout.size == size
    assert planned.advice.taken.layout.groups == 8 // size
    assert planned.advice.policy == "cover"


def test_three_chips_serve_what_the_rule_wants_four_for():
    planned = make_plan(model(60.0, sizes=(1, 2, 3)), chips(3), wishes(), None)
    assert planned.advice.taken.layout.size == 3
    assert "above 2" in planned.advice.rule


def test_blocks_are_told_where_workers_would_take_too_few():
    planned = make_plan(model(23.0), chips(), wishes(context=8192, requests=2), None)
    found = planned.advice.taken
    assert found.layout.size == 1
    assert found.blocks < 2 * 512 <= found.blocks_most
    assert planned.advice.kv_blocks == 2 * 512


def test_the_policy_with_room_for_more_requests_is_taken():
    # 9 heads of 3 groups over 4 chips: one rank touches two KV heads under cover.
    asked = wishes(context=8192, running=64)
    planned = make_plan(
        model(12.0, query_heads=9, kv_heads=3, sizes=(1, 3)), chips(3, 5.0), asked, None
    )
    assert planned.advice.taken.layout.size == 3
    found = {row.held.needs.policies: row.held.requests for row in planned.rows}
    assert found["cover", "shard"] > found["replicate",]
    assert planned.advice.policy == "cover"


def test_more_requests_or_a_longer_context_take_larger_groups():
    few = make_plan(model(20.0), chips(), wishes(context=2048), None)
    many = make_plan(model(20.0), chips(), wishes(context=8192, requests=16), None)
    assert few.advice.taken.layout.size == 1
    assert many.advice.taken.layout.size > 1
    assert many.advice.taken.can_serve


def test_a_shortage_names_bytes_and_every_remedy_that_helps():
    large = make_plan(model(60.0, sizes=(1, 2, 4)), chips(2), wishes(), None)
    assert large.advice is None
    small = make_plan(model(15.0, sizes=(1, 2)), chips(2), wishes(), None)
    found = shortage_of(large, {"int8": small, "native": large})
    assert found.nearest.layout.size == 2
    assert found.nearest.missing_bytes > 6 * GIB
    assert found.remedies == (
        "--weights int8: 2 groups of 1 chip would do",
        "more chips: a group of 4 would do; there are 2",
    )
    text = "\n".join(shortage_lines(large, found))
    assert f"lacks {found.nearest.missing_bytes} bytes" in text


def test_a_shorter_context_is_a_remedy_that_fits():
    asked = wishes(context=8192, requests=16)
    planned = make_plan(model(23.95, sizes=(1,)), chips(1), asked, None)
    assert planned.advice is None
    found = shortage_of(planned, {})
    (remedy,) = found.remedies
    context = int(remedy.split("--context ")[1].split()[0])
    shorter = replace(asked, context_tokens=context)
    assert make_plan(planned.model, planned.chips, shorter, None).advice is not None
    longer = replace(asked, context_tokens=context + BLOCK_TOKENS)
    assert make_plan(planned.model, planned.chips, longer, None).advice is None


def test_more_chips_are_no_remedy_where_all_share_one_memory():
    shared = chips(2, 16.0, shared=True)
    planned = make_plan(model(60.0, sizes=(1, 2, 4, 8)), shared, wishes(), None)
    assert shortage_of(planned, {}).remedies == ("more memory of this machine, or a smaller model",)


# ---------------------------------------------------------------- speed

TIMES = StepTime(0.004, 0.0004, 1e-7, 0.0005, 1e-6)


def calibration(group_size=1, **changes):
    works = [StepWork(512, context_of_chunk(0, 512), 0, 0), StepWork(0, 0, 32, 32 * 4096)]
    return replace(
        Calibration(
            model="model.gguf",
            model_digest="digest",
            backend="cpu",
            group_size=group_size,
            dtype="bfloat16",
            weights="auto",
            device="cores 0",
            measured_at="2026-11-30T13:10:00+00:00",
            settings=CalibratedSettings(512, 32),
            step_time=TIMES,
            block_tokens=BLOCK_TOKENS,
            kv_blocks=4096,
            points=tuple(Point(work, TIMES.predict(work)) for work in works),
        ),
        **changes,
    )


def speeds(measured, planned_chips, asked, needs=None):
    planned = make_plan(needs or model(4.0), planned_chips, asked, measured)
    return {
        row.held.layout.size: row.speed
        for row in planned.rows
        if "cover" in row.held.needs.policies
    }


def test_a_group_as_measured_is_as_fast_as_the_model_says():
    found = speeds(calibration(), chips(), wishes(context=4096))[1]
    step_s = 0.004 + 32 * 0.0005 + 32 * 2048 * 1e-6
    assert found.rows == 32
    assert found.decode_step_s == pytest.approx(step_s)
    assert found.decode_tokens_per_s == pytest.approx(32 / step_s)
    assert found.total_decode_tokens_per_s == pytest.approx(8 * 32 / step_s)
    chunk_s = 0.004 + 512 * 0.0004 + context_of_chunk(0, 512) * 1e-7
    assert found.prefill_tokens_per_s == pytest.approx(512 / chunk_s)
    assert not found.extrapolated
    assert not found.beyond


def test_a_larger_group_divides_the_work_but_not_the_fixed_time():
    found = speeds(calibration(), chips(), wishes(context=4096))[4]
    step_s = 0.004 + 32 * 0.0005 / 4 + 32 * 2048 * 1e-6 / 4
    assert found.decode_step_s == pytest.approx(step_s)
    assert found.extrapolated


def test_an_uneven_group_is_as_fast_as_its_fullest_chip():
    needs = model(4.0, query_heads=9, kv_heads=3, sizes=(1, 2))
    found = speeds(calibration(), chips(2), wishes(context=4096), needs)[2]
    # 5 of 9 query heads, with their share of the weights, and 2 of 3 KV heads.
    step_s = 0.004 + 32 * 0.0005 * 5 / 9 + 32 * 2048 * 1e-6 * 2 / 3
    assert found.decode_step_s == pytest.approx(step_s)
    chunk_s = 0.004 + (512 * 0.0004 + context_of_chunk(0, 512) * 1e-7) * 5 / 9
    assert found.prefill_tokens_per_s == pytest.approx(512 / chunk_s)


def test_nothing_is_said_of_groups_smaller_than_the_one_measured():
    found = speeds(calibration(group_size=2), chips(), wishes(context=4096))
    assert found[1] is None
    assert not found[2].extrapolated
    assert found[4].extrapolated


def test_chips_that_share_a_memory_are_known_only_as_measured():
    shared = chips(2, 24.0, shared=True)
    found = speeds(calibration(), shared, wishes(context=4096))
    assert found[2] is None
    assert found[1].total_decode_tokens_per_s is None
    alone = speeds(calibration(), chips(1, 24.0, shared=True), wishes(context=4096))
    assert alone[1].total_decode_tokens_per_s == alone[1].decode_tokens_per_s


def test_a_layout_that_holds_no_request_has_no_speed():
    needs = model(24.5, sizes=(1, 2))
    assert speeds(calibration(), chips(2), wishes(), needs)[1] is None


def test_more_than_was_measured_is_marked():
    few = calibration(points=(Point(StepWork(512, context_of_chunk(0, 512), 8, 8 * 4096), 0.1),))
    assert speeds(few, chips(), wishes(context=4096))[1].beyond
    assert not speeds(few, chips(), wishes(context=4096, running=8))[1].beyond


@pytest.mark.parametrize(
    ("changes", "says", "remedy"),
    [
        ({"dtype": "float32"}, "dtype: float32; here it is bfloat16", "--dtype bfloat16"),
        ({"model_digest": "other"}, "model (model.gguf): digest other; here it is", "--model"),
        ({"backend": "sim"}, "backend: sim; here it is cpu", "--backend cpu"),
        ({"device": "cores 0,1"}, "chip: cores 0,1; here it is cores 0", "--chips 8"),
        (
            {"weights": "int8", "model_digest": "other"},
            "form of weights: int8; here it is bf16",
            "--weights auto",
        ),
    ],
)
def test_a_calibration_of_something_else_says_what_to_measure(changes, says, remedy):
    other = calibration(**changes)
    useless = why_useless(other, model(), chips())
    assert f"it was measured with another {says}" in useless
    assert f"`polychip calibrate {remedy}`" in useless
    planned = make_plan(model(4.0), chips(), wishes(), other)
    assert all(row.speed is None for row in planned.rows)
    assert f"Speeds are not known: {planned.uncalibrated}." in plan_lines(planned)


def test_weights_that_auto_means_are_the_same():
    assert why_useless(calibration(weights="bf16"), model(), chips()) is None


def test_chips_that_are_not_there_are_taken_to_be_like_those_measured():
    other = calibration(device="cores 0,1")
    assert why_useless(other, model(), chips(at_hand=False)) is None


def test_a_calibration_of_a_size_no_layout_has_is_a_ground_if_its_needs_are_known():
    needs = model(4.0, sizes=(1, 2, 3, 4, 8))
    planned = make_plan(needs, chips(), wishes(), calibration(group_size=3))
    four = held(planned, 4)
    found = speed(calibration(group_size=3), needs, four, chips(), wishes())
    assert found.extrapolated
    unknown = speed(calibration(group_size=5), needs, held(planned, 8), chips(), wishes())
    assert unknown is None


# ---------------------------------------------------------------- report


@pytest.mark.parametrize(
    ("count", "text"),
    [(17, "17 B"), (1536, "1.50 KiB"), (-3 << 20, "-3.00 MiB"), (5 << 29, "2.50 GiB")],
)
def test_sizes_are_told_in_the_largest_unit_they_fill(count, text):
    assert size_text(count) == text


def test_the_table_tells_what_is_known_and_what_is_not():
    shared = chips(2, 24.0, shared=True)
    lines = plan_lines(make_plan(model(4.0), shared, wishes(), calibration()))
    head = next(line for line in lines if line.startswith("groups"))
    rows = lines[lines.index(head) + 1 :]
    assert "decode tokens/s" in head
    assert "not measured" in rows[1]
    assert any("share a memory" in line for line in rows)
    without = plan_lines(make_plan(model(4.0), shared, wishes(), None))
    assert "decode" not in next(line for line in without if line.startswith("groups"))


def test_the_advice_tells_numbers_rule_and_command():
    planned = make_plan(model(30.0), chips(), wishes(context=8192), None)
    text = "\n".join(advice_lines(planned, planned.advice, "polychip serve --groups 2,2,2,2"))
    assert "4 groups of 2 chips, KV policy cover" in text
    assert "P/M = 1.25" in text
    assert "15.00 GiB of weights" in text
    assert "polychip serve --groups 2,2,2,2" in text
