"""Scores of a prompt are those of a dense model, whatever the chunks, the ranks, the neighbours."""

import functools

import pytest
import torch

from chip_worker import prompt_scorer
from chip_worker.batch import Fault, FaultKind, RowWants, StepRow
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, admission
from tests.fakes.dense_llama import dense_logits

MODEL = TinyLlama(query_heads=6, kv_heads=3, tied=False, vocabulary=256, seed=5)
PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50]
BLOCKS = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(params=[1, 2], ids=["alone", "two ranks"])
def group(path, request):
    return ComputeGroup.open(path, request.param).form()


def scoring(ids=PROMPT, slot=0, tops=3, **changes):
    wants = RowWants(prompt_top_tokens=tops)
    return admission(ids, slot=slot, wants=wants, **changes)


def blocks(slot):
    return tuple((slot, 0, slot * BLOCKS + block) for block in range(BLOCKS))


def score_in_chunks(group, chunks, admitted=None):
    """PromptScores of each chunk."""
    fields = {"admissions": (admitted or scoring(),), "new_blocks": blocks(0)}
    found = []
    for place, tokens in enumerate(chunks):
        last = place + 1 == len(chunks)
        result = group.result(**fields, rows=(StepRow(0, tokens, last),))
        found.append(result.prompt_scores)
        fields = {}
    return found


@functools.cache
def expected_logprobs(ids=tuple(PROMPT), vocabulary=None):
    """[T, V]: at p, those of token p + 1."""
    return torch.log_softmax(
        dense_logits(MODEL, MODEL.tensors(), list(ids))[:, :vocabulary], dim=-1
    )


def check_scores(scores, first, logprobs=None, ids=PROMPT, tops=3):
    """`scores` are of the tokens of `ids` from `first` on."""
    logprobs = expected_logprobs(tuple(ids)) if logprobs is None else logprobs
    for index, logprob in enumerate(scores.logprobs, start=first):
        assert logprob == pytest.approx(float(logprobs[index - 1, ids[index]]), abs=2e-4)
    assert len(scores.tops) == (len(scores.logprobs) if tops else 0)
    for index, top in enumerate(scores.tops, start=first):
        expected = logprobs[index - 1].topk(tops)
        assert list(top.token_ids) == expected.indices.tolist()
        assert top.logprobs == pytest.approx(expected.values.tolist(), abs=2e-4)


@pytest.mark.parametrize(
    "chunks", [[17], [16, 1], [1, 16], [5, 5, 5, 2], [1] * 17, [4, 12, 1]], ids=str
)
def test_chunks_score_every_token_but_the_first_once(group, chunks):
    first = 1
    for (scores,), tokens in zip(score_in_chunks(group, chunks), chunks, strict=True):
        assert len(scores.logprobs) == min(tokens, len(PROMPT) - first)
        check_scores(scores, first)
        first += len(scores.logprobs)
    assert first == len(PROMPT)


@pytest.mark.parametrize("places", [1, 3, 4, 16])
def test_scoring_in_slices_changes_nothing(group, places, monkeypatch):
    monkeypatch.setattr(prompt_scorer, "PLACES_MAX", places)
    ((scores,),) = score_in_chunks(group, [17])
    assert len(scores.logprobs) == 16
    check_scores(scores, 1)


def test_no_more_logits_exist_at_once_than_a_slice(path, monkeypatch):
    group = ComputeGroup.open(path).form()
    runner = group.ranks[0].session._formation._runner
    logits, seen = runner.logits, []

    def watched(hidden, places):
        seen.append(len(places))
        return logits(hidden, places)

    monkeypatch.setattr(runner, "logits", watched)
    monkeypatch.setattr(prompt_scorer, "PLACES_MAX", 6)
    score_in_chunks(group, [17])
    assert sorted(seen) == [1, 4, 6, 6]


def test_rows_of_one_step_are_scored_apart_and_cut_to_their_own_tops(group):
    other = [7, 9, 2, 4, 4]
    result = group.result(
        admissions=(
            scoring(tops=3),
            admission([8, 9, 10], slot=1),
            scoring(other, slot=2, tops=0),
            scoring([1], slot=3),
        ),
        new_blocks=tuple(block for slot in range(4) for block in blocks(slot)),
        rows=(StepRow(1, 3, True), StepRow(3, 1, True), StepRow(2, 5, True), StepRow(0, 9, False)),
    )
    alone, without_tops, with_tops = result.prompt_scores
    assert alone.logprobs == ()
    assert len(without_tops.logprobs) == 4
    check_scores(without_tops, 1, ids=other, tops=0)
    assert len(with_tops.logprobs) == 9
    check_scores(with_tops, 1)
    assert len(result.rows) == 3


def test_decode_rows_have_no_part_in_scoring(group):
    score_in_chunks(group, [17])
    assert group.result(rows=(StepRow(0, 1, True),)).prompt_scores == ()


def test_a_replay_scores_its_prompt_again_but_not_its_output(group):
    replayed = scoring([*PROMPT, 7, 8, 9], output_start=len(PROMPT))
    (first,), second = score_in_chunks(group, [15, 5], replayed)
    check_scores(first, 1)
    assert len(first.logprobs) == 15
    assert len(second[0].logprobs) == 1
    check_scores(second[0], 16)


def test_scores_are_of_the_known_vocabulary(path):
    group = ComputeGroup.open(path, 2).form(vocabulary_tokens=150)
    ((scores,),) = score_in_chunks(group, [17])
    check_scores(scores, 1, expected_logprobs(vocabulary=150))


def test_scoring_changes_no_drawn_token(path):
    plain = ComputeGroup.open(path).form().generate(PROMPT, 1)
    result = (
        ComputeGroup.open(path)
        .form()
        .result(
            admissions=(scoring(),), new_blocks=blocks(0), rows=(StepRow(0, len(PROMPT), True),)
        )
    )
    assert result.rows[0].token_ids == plain[0].token_ids


def test_a_token_that_is_not_known_yet_cannot_be_scored(path):
    group = ComputeGroup.open(path).form()
    partial = scoring(PROMPT[:8], output_start=len(PROMPT))
    group.result(admissions=(partial,), new_blocks=blocks(0), rows=(StepRow(0, 7, False),))
    with pytest.raises(AssertionError, match="score token 8, but knows 8"):
        group.result(rows=(StepRow(0, 1, False),))
    fault = group.ranks[0].last
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.DIVERGED
