"""Ids the tokenizer does not know are for nobody: not drawn, not listed, not scored, not shown."""

import numpy as np
import pytest
import torch

from chip_worker.batch import RowWants, SlotSampling, StepRow
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, admission
from tests.fakes.dense_llama import dense_logits

MODEL = TinyLlama(query_heads=6, kv_heads=3, tied=False, vocabulary=256, seed=5)
PROMPT = [3, 141, 59, 26, 5]
KNOWN = 150
BLOCKS = tuple((0, 0, block) for block in range(8))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), MODEL)


def one_step(group, ids, **wants):
    admitted = admission(ids, wants=RowWants(**wants))
    return group.result(
        admissions=(admitted,), new_blocks=BLOCKS, rows=(StepRow(0, len(ids), True),)
    )


@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "two ranks"])
def test_everything_is_of_the_known_ids(path, ranks):
    group = ComputeGroup.open(path, ranks).form(vocabulary_tokens=KNOWN)
    raw = dense_logits(MODEL, MODEL.tensors(), PROMPT)
    assert int(raw[-1].argmax()) != int(raw[-1, :KNOWN].argmax()), "the cut must matter here"
    result = one_step(
        group, PROMPT, logprobs=True, top_tokens=KNOWN, prompt_top_tokens=KNOWN, logits=True
    )
    expected = torch.log_softmax(raw[:, :KNOWN], dim=-1)
    (row,), (scores,) = result.rows, result.prompt_scores
    assert row.token_ids == (int(raw[-1, :KNOWN].argmax()),)
    assert row.logprobs == pytest.approx((float(expected[-1].max()),), abs=2e-4)
    assert sorted(row.tops[0].token_ids) == list(range(KNOWN))
    assert np.frombuffer(row.logits, "<f4") == pytest.approx(raw[-1, :KNOWN].numpy(), abs=2e-4)
    assert scores.logprobs == pytest.approx(
        [float(expected[place, token]) for place, token in enumerate(PROMPT[1:])], abs=2e-4
    )
    assert [sorted(top.token_ids) for top in scores.tops] == [list(range(KNOWN))] * 4


def test_no_draw_is_beyond_them(path):
    group = ComputeGroup.open(path).form(vocabulary_tokens=10)
    admitted = admission(PROMPT[:1], sampling=SlotSampling(temperature=100.0, seed=3))
    fields = {"admissions": (admitted,), "new_blocks": BLOCKS}
    drawn = []
    for _ in range(20):
        drawn += group.result(**fields, rows=(StepRow(0, 1, True),)).rows[0].token_ids
        fields = {}
    assert set(drawn) <= set(range(10))
    assert len(set(drawn)) > 3
