"""A model with windows computes the same whatever becomes of the blocks behind them."""

import pytest

from chip_worker.batch import StepRow
from chip_worker.model_runner import ModelRunner
from control_plane.scheduling.kv_groups import KVGroups
from tests.fakes.checkpoints import write_hugging_face
from tests.fakes.compute_group import BLOCK_TOKENS, ComputeGroup, SlotBlocks, admission, token_ids
from tests.fakes.tiny_gemma import TinyGemma

PROMPT = [(7 * n * n + 3 * n + 5) % 197 for n in range(41)]
COUNT = 12
CONTEXT = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("gemma"), TinyGemma(layers=7))


@pytest.fixture(scope="module")
def undisturbed(path):
    """One chunk of the whole prompt: nothing was dropped before it."""
    return group_of(path).generate(PROMPT, COUNT, chunk=64)


def group_of(path, ranks=1, **settings):
    return ComputeGroup.open(path, ranks, **settings).form(chunk_tokens=64)


def check_same(found, expected):
    assert token_ids(found) == token_ids(expected)
    for each, right in zip(found, expected, strict=True):
        assert each.logprobs == pytest.approx(right.logprobs, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7])
def test_blocks_are_dropped_and_given_again_within_a_request(path, undisturbed, chunk):
    check_same(group_of(path).generate(PROMPT, COUNT, chunk=chunk), undisturbed)


def test_ranks_drop_alike(path, undisturbed):
    check_same(group_of(path, ranks=2).generate(PROMPT, COUNT, chunk=7), undisturbed)


def test_what_was_dropped_may_be_anything(path, undisturbed, monkeypatch):
    """Blocks behind a window are not numbers any more, from the step on that drops them."""
    group = group_of(path)
    pool = group.ranks[0].session._formation._pool
    tables = group.ranks[0].session._formation._tables
    forward, spoiled = ModelRunner.forward, []

    def spoil_idle_blocks(runner, batch):
        held = {block for table in tables._slots[0].tables for block in table.block_ids}
        for block in set(range(pool.capacity)) - held:
            spoiled.append(block)
            pool._arena.bytes[int(pool._physical[block])] = 0xFF
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", spoil_idle_blocks)
    check_same(group.generate(PROMPT, COUNT, chunk=7), undisturbed)
    assert spoiled


def test_a_windowed_prefix_is_taken_from_its_last_blocks(path, undisturbed):
    """Another request computed 40 tokens; of the groups with a window it holds the last 11."""
    group = group_of(path)
    windows = group.ranks[0].session.kv_windows
    first = SlotBlocks(0, windows)
    fields = first.fields(0, 24)
    group.step(admissions=(admission(PROMPT),), **fields, rows=(StepRow(0, 24, False),))
    group.step(**first.fields(24, 40), rows=(StepRow(0, 16, False),))
    group.step(**first.fields(40, 40))
    assert [len(held) for held in first.held] == [10] + [3] * 6
    tables = tuple(map(tuple, first.held))
    warm = group.step(
        releases=(0,),
        admissions=(admission(PROMPT, slot=1, cached_count=40, block_tables=tables),),
        new_blocks=tuple((1, kv_group, 300 + kv_group) for kv_group in range(len(windows))),
        rows=(StepRow(1, 1, True),),
    )
    check_same(warm, undisturbed[:1])


def test_as_many_blocks_as_the_control_plane_wants_are_enough_for_full_slots(path):
    """Every slot fills its context, in chunks, with half of the blocks."""
    group = ComputeGroup.open(path)
    windows = group.ranks[0].session.kv_windows
    wanted = 2 * KVGroups(windows, BLOCK_TOKENS, 8).cost(CONTEXT)
    # 11 + 8 - 1 tokens are in at most 6 blocks of 4; the control plane keeps two more.
    assert wanted == 2 * (16 + 6 * (6 + 2))
    group.form(chunk_tokens=8, slots=2, context_tokens=CONTEXT, blocks_wanted=wanted)
    capacity = group.ranks[0].last.blocks
    assert capacity == wanted
    prompt = (PROMPT * 2)[:CONTEXT]
    slots = [SlotBlocks(slot, windows, slot * (capacity // 2)) for slot in range(2)]
    for start in range(0, CONTEXT, 8):
        for slot, blocks in enumerate(slots):
            admissions = (admission(prompt, slot=slot),) if start == 0 else ()
            fields = blocks.fields(start, start + 8)
            assert all(block < capacity for _, _, block in fields["new_blocks"])
            group.step(admissions=admissions, **fields, rows=(StepRow(slot, 8, False),))
    assert [len(held) for held in slots[1].held] == [16] + [5] * 6
