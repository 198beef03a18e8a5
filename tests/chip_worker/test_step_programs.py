"""Captured steps: the same tokens and logits as operation by operation, whatever the steps are."""

import random

import pytest

from chip_worker.batch import RowWants, StepRow
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, admission
from tests.fakes.tiny_gemma import TinyGemma

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


@pytest.mark.parametrize(("ranks", "weights"), [(1, "auto"), (2, "auto"), (1, "int8")])
def test_captured_steps_compute_the_same_bits(path, ranks, weights):
    form = {"slots": SLOTS, "context_tokens": CONTEXT, "block_tokens": BLOCK_TOKENS}
    captured = ComputeGroup.open(path, ranks, weights=weights).form(**form)
    computed = ComputeGroup.open(path, ranks, weights=weights, captured_tokens=0).form(**form)
    for seed in range(3):
        assert served(captured, seed) == served(computed, seed)
        for group in (captured, computed):
            group.result(releases=tuple(group.ranks[0].session._formation.occupied_slots()))
