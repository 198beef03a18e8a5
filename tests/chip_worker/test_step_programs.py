"""Captured steps: the same tokens and logits as operation by operation, whatever the steps are."""

import random

import pytest

from backends.cpu.device import CpuDevice
from backends.cpu.shared_memory_library import LIBRARY_PATH
from backends.errors import OutOfMemory
from chip_worker.batch import RowWants, StepRow
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, admission
from tests.fakes.shared_memory_ranks import SharedMemoryRuntime
from tests.fakes.tiny_gemma import TinyGemma

NATIVE_COLLECTIVES = pytest.mark.skipif(
    not LIBRARY_PATH.exists(), reason="no compiler: scripts/setup built no native collectives"
)
SLOTS, CONTEXT, BLOCK_TOKENS = 4, 64, 4
WANTS = RowWants(logprobs=True, logits=True)


@pytest.fixture(scope="module", params=["llama", "windows"])
def path(request, tmp_path_factory):
    model = TinyGemma(layers=6) if request.param == "windows" else TinyLlama(vocabulary=96)
    return write_hugging_face(tmp_path_factory.mktemp("model"), model)


def served(group, seed):
    """Random steps of several requests at once; what every one of them returned."""
    rng = random.Random(seed)
    groups = len(group.ranks[0].session.kv_windows)
    table = CONTEXT // BLOCK_TOKENS
    left = {}
    results, releases = [], []
    for _ in range(30):
        admissions, new_blocks = [], []
        for slot in set(range(SLOTS)) - set(left):
            if rng.random() < 0.5:
                prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 40))]
                admissions.append(admission(prompt, slot=slot, wants=WANTS))
                new_blocks += [
                    (slot, kv_group, (slot * groups + kv_group) * table + block)
                    for kv_group in range(groups)
                    for block in range(table)
                ]
                left[slot] = [len(prompt), rng.randrange(1, 12)]
        rows, budget = [], 32
        for slot, (prompt, decodes) in left.items():
            tokens = min(prompt, rng.randrange(1, 16), budget) if prompt else 1
            if not tokens or budget < 1:
                continue
            budget -= tokens
            rows.append(StepRow(slot, tokens, tokens >= prompt))
            left[slot] = [prompt - tokens, decodes] if prompt > tokens else [0, decodes - 1]
        result = group.result(
            releases=tuple(releases),
            admissions=tuple(admissions),
            new_blocks=tuple(new_blocks),
            rows=tuple(rows),
        )
        results.append((result.rows, result.prompt_scores))
        releases = [slot for slot, (prompt, decodes) in left.items() if not prompt and not decodes]
        for slot in releases:
            del left[slot]
    return results


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {}),
        (1, {"weights": "int8"}),
        pytest.param(2, {"runtime_class": SharedMemoryRuntime}, marks=NATIVE_COLLECTIVES),
        pytest.param(3, {"runtime_class": SharedMemoryRuntime}, marks=NATIVE_COLLECTIVES),
    ],
)
def test_captured_steps_compute_the_same_bits(path, ranks, settings):
    form = {"slots": SLOTS, "context_tokens": CONTEXT, "block_tokens": BLOCK_TOKENS}
    captured = ComputeGroup.open(path, ranks, **settings).form(**form)
    computed = ComputeGroup.open(path, ranks, captured_tokens=0, **settings).form(**form)
    for seed in range(3):
        assert served(captured, seed) == served(computed, seed)
        for group in (captured, computed):
            group.result(releases=tuple(group.ranks[0].session._formation.occupied_slots()))


def test_without_memory_for_a_program_steps_are_computed_operation_by_operation(path, monkeypatch):
    form = {"slots": SLOTS, "context_tokens": CONTEXT, "block_tokens": BLOCK_TOKENS}
    expected = served(ComputeGroup.open(path).form(**form), 1)
    asked = []

    def capture(_device, _function):
        asked.append(True)
        raise OutOfMemory("no room")

    monkeypatch.setattr(CpuDevice, "capture", capture)
    assert served(ComputeGroup.open(path).form(**form), 1) == expected
    assert asked == [True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_how_a_prompt_is_cut_changes_no_bit(path, dtype):
    """Captured or not, alone or beside others: what is decoded after it has the same logits."""
    prompt = [7 * number % 90 for number in range(200)]
    slots = {"slots": 2, "context_tokens": 256, "block_tokens": BLOCK_TOKENS, "chunk_tokens": 256}
    group = ComputeGroup.open(path, dtype=dtype).form(**slots)
    groups = len(group.ranks[0].session.kv_windows)
    blocks = tuple(
        (slot, kv_group, (slot * groups + kv_group) * 64 + block)
        for slot in range(2)
        for kv_group in range(groups)
        for block in range(64)
    )
    found = []
    for seed in range(6):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(1, 200), rng.randrange(6))) if seed else []
        group.result(
            admissions=(admission([1], slot=1), admission(prompt, slot=0, wants=WANTS)),
            new_blocks=blocks,
            rows=(StepRow(1, 1, True),),
        )
        for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
            company = (StepRow(1, 1, True),) if rng.random() < 0.5 else ()
            rows = group.step(rows=(*company, StepRow(0, stop - start, stop == 200)))
        found.append(
            [
                rows[-1].logits,
                *(group.step(rows=(StepRow(0, 1, True),))[0].logits for _ in range(3)),
            ]
        )
        group.result(releases=(0, 1))
    assert all(each == found[0] for each in found[1:])
