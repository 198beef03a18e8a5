"""The model over the paged cache gives the numbers of a dense one, however it is cut."""

import numpy as np
import pytest
import torch

from chip_worker.batch import SlotSampling, StepRow
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, admission, token_ids
from tests.fakes.dense_llama import dense_greedy, dense_logits

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50]
MODELS = {
    "six-over-two": TinyLlama(),
    "five-over-one": TinyLlama(query_heads=5, kv_heads=1, seed=3),
    "untied": TinyLlama(query_heads=6, kv_heads=3, tied=False, vocabulary=256, seed=5),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {name: write_hugging_face(directory / name, model) for name, model in MODELS.items()}


def logits_of(results):
    return torch.tensor(np.stack([np.frombuffer(row.logits, dtype="<f4") for row in results]))


def expected_logits(model, results):
    ids = PROMPT + token_ids(results)[:-1]
    return dense_logits(model, model.tensors(), ids)[len(PROMPT) - 1 :]


GROUPS = [(1, "cover"), (2, "cover"), (3, "cover"), (2, "replicate"), (2, "shard")]


@pytest.mark.parametrize(
    ("name", "world_size", "policy"),
    [
        (name, world_size, policy)
        for name, model in MODELS.items()
        for world_size, policy in GROUPS
        if policy != "shard" or world_size <= model.kv_heads
    ],
)
def test_any_group_computes_what_the_dense_model_computes(paths, name, world_size, policy):
    model = MODELS[name]
    group = ComputeGroup.open(paths[name], world_size).form(kv_policy=policy)
    results = group.generate(PROMPT, 12, chunk=7)
    found, expected = logits_of(results).double(), expected_logits(model, results)
    assert torch.allclose(found, expected, atol=2e-4), (found - expected).abs().max()
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99999
    assert token_ids(results) == dense_greedy(model, model.tensors(), PROMPT, 12)
    logprobs = torch.log_softmax(expected, dim=-1)
    for row, result in enumerate(results):
        assert result.logprobs[0] == pytest.approx(
            float(logprobs[row, result.token_ids[0]]), abs=2e-4
        )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_several_chips_compute_what_one_computes(paths, name, world_size):
    """Cosine of the logits, greedy text, and how far the next-token distributions are apart."""
    alone = ComputeGroup.open(paths[name]).form().generate(PROMPT, 16)
    group = ComputeGroup.open(paths[name], world_size).form()
    together = group.generate(PROMPT, 16)
    assert token_ids(together) == token_ids(alone)
    found, expected = logits_of(together).double(), logits_of(alone).double()
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.9999
    variation = (found.softmax(dim=-1) - expected.softmax(dim=-1)).abs().sum(dim=-1) / 2
    assert variation.max() <= 1e-4


def test_a_gguf_gives_what_the_directory_gives(paths, tmp_path):
    model = MODELS["six-over-two"]
    group = ComputeGroup.open(write_gguf(tmp_path / "model.gguf", model)).form()
    expected = ComputeGroup.open(paths["six-over-two"]).form()
    found = logits_of(group.generate(PROMPT, 4))
    assert torch.equal(found, logits_of(expected.generate(PROMPT, 4)))


def test_bfloat16_is_close_to_float32(paths):
    wide = ComputeGroup.open(paths["untied"]).form().generate(PROMPT, 1)
    for world_size in (1, 2):
        group = ComputeGroup.open(paths["untied"], world_size, dtype="bfloat16").form()
        narrow = group.generate(PROMPT, 1)
        cosine = torch.nn.functional.cosine_similarity(logits_of(narrow), logits_of(wide))
        assert cosine.min() > 0.999


@pytest.mark.parametrize("chunk", [1, 4, 5, 16])
def test_a_prefill_in_chunks_is_a_prefill(paths, chunk):
    whole = ComputeGroup.open(paths["untied"]).form().generate(PROMPT, 3)
    parts = ComputeGroup.open(paths["untied"]).form().generate(PROMPT, 3, chunk=chunk)
    assert token_ids(parts) == token_ids(whole)
    assert torch.allclose(logits_of(parts), logits_of(whole), atol=1e-4)


def test_a_cached_prefix_is_a_computed_one(paths):
    group = ComputeGroup.open(paths["untied"]).form()
    cold = group.generate(PROMPT, 3)
    (warm,) = group.step(
        admissions=(admission(PROMPT, slot=2, cached_count=16, block_tables=((0, 1, 2, 3),)),),
        new_blocks=((2, 0, 9),),
        rows=(StepRow(2, 1, True),),
    )
    assert warm.token_ids == cold[0].token_ids
    assert torch.allclose(logits_of([warm]), logits_of(cold[:1]), atol=1e-4)


def test_neighbours_in_the_batch_do_not_change_a_row(paths):
    alone = ComputeGroup.open(paths["untied"]).form().generate(PROMPT, 6)
    group = ComputeGroup.open(paths["untied"]).form()
    blocks = tuple((0, 0, block) for block in range(6))
    others = [(slot, [slot * 7 + 1, 9, 2][: slot + 1]) for slot in (1, 2, 3)]
    step = {
        "admissions": (admission(PROMPT), *(admission(ids, slot=slot) for slot, ids in others)),
        "new_blocks": (
            *blocks,
            *((slot, 0, 20 + 3 * slot + n) for slot, _ in others for n in (0, 1)),
        ),
        "rows": (
            StepRow(1, 2, True),
            StepRow(0, len(PROMPT), True),
            StepRow(3, 3, True),
            StepRow(2, 3, True),
        ),
    }
    crowded = [group.step(**step)[1]]
    for _ in range(4):
        rows = tuple(StepRow(slot, 1, True) for slot in (3, 2, 0, 1))
        crowded.append(group.step(rows=rows)[2])
    assert token_ids(crowded) == token_ids(alone)[:5]
    assert torch.allclose(logits_of(crowded), logits_of(alone[:5]), atol=1e-4)


def test_a_replay_draws_the_tokens_the_first_run_drew(paths):
    sampling = SlotSampling(temperature=1.3, seed=2**63 + 11, choice=1)
    first = ComputeGroup.open(paths["untied"]).form().generate(PROMPT, 12, sampling=sampling)
    drawn = token_ids(first)
    assert drawn != token_ids(ComputeGroup.open(paths["untied"]).form().generate(PROMPT, 12))
    group = ComputeGroup.open(paths["untied"], 2).form()
    replayed = admission(PROMPT + drawn[:5], slot=3, output_start=len(PROMPT), sampling=sampling)
    results = list(
        group.step(
            admissions=(replayed,),
            new_blocks=tuple((3, 0, block) for block in range(8)),
            rows=(StepRow(3, len(PROMPT) + 5, True),),
        )
    )
    for _ in range(6):
        results += group.step(rows=(StepRow(3, 1, True),))
    assert token_ids(results) == drawn[5:]
