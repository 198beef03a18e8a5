"""Filters and adjustments agree with an independent implementation, transformers' own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chip_worker.batch import RowWants, SlotSampling
from chip_worker.logit_adjustments import adjust_rows, unpacked
from chip_worker.slots import Slot
from kernels.reference import adjust_logits
from kernels.sampling_reference import filtered_logits

PROGRAM = Path(__file__).parents[1] / "fakes" / "transformers_logits.py"
ROWS, VOCABULARY, PROMPT_COUNT = 240, 400, 30
BIASES = {3: 2.5, 17: -4.0, 200: 100.0, 399: -100.0}
SUPPRESSED = [2, 17, 60]


def make_cases():
    random = np.random.default_rng(23)

    def pick(*values):
        return random.choice(np.array(values), ROWS)

    return {
        "logits": random.normal(size=(ROWS, VOCABULARY)).astype(np.float32) * 3,
        "temperature": pick(0.3, 0.8, 1.0, 1.7),
        "top_k": pick(0, 1, 5, 50, 399),
        "top_p": pick(1.0, 0.95, 0.7, 0.2),
        "min_p": pick(0.0, 0.02, 0.3),
        "ids": random.integers(0, VOCABULARY, (ROWS, 80)),
        "prompt_count": np.array(PROMPT_COUNT),
        "penalty": pick(1.0, 1.1, 1.8, 0.7),
        "min_tokens": pick(0, 50, 51, 80),
        "bias_ids": np.array(list(BIASES)),
        "biases": np.array(list(BIASES.values())),
        "suppressed": np.array(SUPPRESSED),
    }


@pytest.fixture(scope="module")
def cases():
    return make_cases()


@pytest.fixture(scope="module")
def theirs(cases, tmp_path_factory):
    directory = tmp_path_factory.mktemp("transformers")
    np.savez(directory / "cases.npz", **cases)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, str(PROGRAM), directory / "cases.npz", directory / "results.npz"],
        check=True,
        timeout=300,
        cwd=directory,
        env=environment | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )
    return np.load(directory / "results.npz")


def test_the_same_tokens_survive_with_the_same_probabilities(cases, theirs):
    ours = filtered_logits(
        torch.from_numpy(cases["logits"]),
        torch.from_numpy(cases["temperature"]).float(),
        torch.from_numpy(cases["top_k"]),
        torch.from_numpy(cases["top_p"]).float(),
        torch.from_numpy(cases["min_p"]).float(),
    )
    expected = torch.from_numpy(theirs["filtered"]).double()
    assert torch.equal(ours.isfinite(), expected.isfinite())
    counts = ours.isfinite().sum(dim=-1)
    assert counts.min() == 1
    assert counts.max() == VOCABULARY
    torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def slot_of(cases, row):
    ids = cases["ids"][row]
    return Slot(
        tokens=ids,
        known=len(ids),
        output_start=PROMPT_COUNT,
        length=len(ids),
        tables=[],
        sampling=SlotSampling(
            temperature=1.0,
            seed=0,
            repetition_penalty=float(cases["penalty"][row]),
            logit_bias=tuple(BIASES.items()),
            suppressed_ids=tuple(SUPPRESSED),
            min_tokens=int(cases["min_tokens"][row]),
        ),
        wants=RowWants(),
    )


def test_bias_repetition_penalty_and_suppression_change_the_same_logits(cases, theirs):
    slots = [slot_of(cases, row) for row in range(ROWS)]
    packed = (torch.from_numpy(part) for part in adjust_rows(slots, VOCABULARY).packed())
    logits = torch.from_numpy(cases["logits"])
    ours = adjust_logits(logits, *unpacked(*packed))
    expected = torch.from_numpy(theirs["adjusted"])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    held_back = ours[:, SUPPRESSED].isneginf().all(dim=-1)
    # 50 tokens are drawn: the next one is number 51.
    assert held_back.tolist() == (cases["min_tokens"] > 50).tolist()
