"""The sampler over real slot tables: what a request asks for is what its row gets."""

import math

import numpy as np
import pytest
import torch

from backends.block_references import BlockReferences
from backends.communicator import SingleRankCommunicator
from backends.cpu.plugin import CpuBackend
from backends.interface import BackendConfig, open_runtime
from chip_worker.batch import Admission, RowWants, SlotSampling, Step, StepRow
from chip_worker.sampler import Sampler, sampler_requirements
from chip_worker.slots import SlotTables
from chip_worker.step_memory import StepMemory
from chip_worker.token_scores import TokenScorer
from tests.fakes.expected_draws import check_draws, drawn_probabilities

VOCABULARY = 24
PROMPT = (1, 2, 3, 2)


class Bench:
    """A sampler with tables; slots are admitted with a prompt and an output drawn before."""

    def __init__(self, slots_count=16):
        config = BackendConfig(chip_indices=(0,), dtype="float32")
        backend = CpuBackend()
        runtime = open_runtime(backend, config)
        device = runtime.acquire(1).granted[0]
        kernels = runtime.bind_kernels(sampler_requirements(64))
        memory = StepMemory(device)
        self.tables = SlotTables(slots_count, 64, 4, BlockReferences(16 * slots_count), 2000)
        self.sampler = Sampler(
            kernels,
            SingleRankCommunicator(),
            memory,
            self.tables,
            TokenScorer(kernels, memory),
        )
        self._count = 0

    def admit(self, prompt=PROMPT, output=(), wants=None, **sampling):
        """A slot whose next token is to be drawn."""
        index, self._count = self._count, self._count + 1
        ids = (*prompt, *output)
        (row,) = self.tables.apply(
            Step(
                1,
                1,
                1,
                admissions=(
                    Admission(
                        index,
                        ids,
                        len(prompt),
                        0,
                        (tuple(range(16 * index, 16 * index + 16)),),
                        SlotSampling(**({"temperature": 0.0, "seed": 5} | sampling)),
                        wants or RowWants(),
                    ),
                ),
                rows=(StepRow(index, len(ids), True),),
            )
        )
        return row.slot

    def sample(self, logits, *slots):
        return self.sampler.sample(torch.tensor(np.stack(logits), dtype=torch.float32), slots)

    def draw_one(self, logits, **admission):
        (result,) = self.sample([logits], self.admit(**admission))
        return result.token_ids[0]


@pytest.fixture
def bench():
    return Bench()


def flat(**values):
    """Logits of 0 but for some ids: flat(i5=2.0)."""
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    for name, value in values.items():
        logits[int(name[1:])] = value
    return logits


# ---------------------------------------------------------------- bias, penalties, suppression


def test_a_bias_adds_to_its_token(bench):
    logits = flat(i5=2.0)
    assert bench.draw_one(logits) == 5
    assert bench.draw_one(logits, logit_bias=((7, 2.5),)) == 7
    assert bench.draw_one(logits, logit_bias=((5, -3.0), (9, 0.5))) == 9
    assert bench.draw_one(logits, logit_bias=((5, -100.0),)) == 0


def test_presence_counts_once_and_frequency_each_time_and_only_in_the_output(bench):
    logits = flat(i5=2.0, i6=1.2)
    once, thrice = (5,), (5, 5, 5)
    assert bench.draw_one(logits, output=thrice, presence_penalty=0.7) == 5
    assert bench.draw_one(logits, output=once, presence_penalty=0.9) == 6
    assert bench.draw_one(logits, output=once, frequency_penalty=0.5) == 5
    assert bench.draw_one(logits, output=thrice, frequency_penalty=0.5) == 6
    assert bench.draw_one(logits, output=thrice, presence_penalty=-0.5, frequency_penalty=0.5) == 6
    in_prompt = {"prompt": (5, 5, 5, 5), "presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert bench.draw_one(logits, **in_prompt) == 5
    assert bench.draw_one(flat(i6=0.1), output=(7,), presence_penalty=-2.0) == 7


def test_repetition_counts_prompt_and_output_and_follows_the_sign(bench):
    logits = flat(i2=2.0, i6=1.5)
    assert bench.draw_one(logits, repetition_penalty=1.2) == 2
    assert bench.draw_one(logits, repetition_penalty=1.5) == 6
    assert bench.draw_one(flat(i9=2.0, i6=1.5), output=(9,), repetition_penalty=1.5) == 6
    negative = np.full(VOCABULARY, -1.0, dtype=np.float32)
    assert bench.draw_one(negative, prompt=(0, 1), repetition_penalty=2.0) == 2
    assert bench.draw_one(negative, prompt=(4, 3), repetition_penalty=0.5) == 3


def test_bias_comes_before_repetition_and_penalties_after(bench):
    # 1 + 3 = 4, halved 2, less 0.5 for one use: 1.5.
    sampling = {
        "output": (5,),
        "logit_bias": ((5, 3.0),),
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
    }
    assert bench.draw_one(flat(i5=1.0, i6=1.45), **sampling) == 5
    assert bench.draw_one(flat(i5=1.0, i6=1.55), **sampling) == 6


def test_ends_are_suppressed_up_to_the_least_number_of_tokens(bench):
    logits = flat(i0=9.0, i4=8.0, i6=1.0)
    held = {"suppressed_ids": (0, 4), "min_tokens": 2}
    assert bench.draw_one(logits, **held) == 6
    assert bench.draw_one(logits, output=(6,), **held) == 6
    assert bench.draw_one(logits, output=(6, 6), **held) == 0
    assert bench.draw_one(logits, output=(6,), logit_bias=((0, 100.0),), **held) == 6
    assert bench.draw_one(logits, suppressed_ids=(0, 4)) == 0


def test_suppressed_tokens_are_never_drawn_however_hot(bench):
    held = {"temperature": 100.0, "suppressed_ids": tuple(range(20)), "min_tokens": 9}
    drawn = {bench.draw_one(flat(), choice=choice, **held) for choice in range(12)}
    assert drawn <= {20, 21, 22, 23}
    assert len(drawn) > 1


def test_what_a_slot_drew_counts_for_its_next_token(bench):
    """No step says so: the tables do."""
    slot = bench.admit(frequency_penalty=1.0)
    drawn = [bench.sample([flat(i5=2.1, i6=1.5)], slot)[0].token_ids[0] for _ in range(4)]
    assert drawn == [5, 6, 5, 6]


def test_ids_beyond_the_logits_are_no_trouble(bench):
    sampling = {
        "prompt": (1, 22, 10_000),
        "output": (23, 11),
        "logit_bias": ((3, 1.0), (9, 2.0), (12, 50.0), (999, 1.0)),
        "suppressed_ids": (2, 15),
        "min_tokens": 5,
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
    }
    assert bench.draw_one(flat(i2=3.0)[:10], **sampling) == 9
    assert bench.draw_one(flat()[:10], prompt=(20, 21), repetition_penalty=2.0) == 0


# ---------------------------------------------------------------- distributions


CASES = {
    "temperature": {"temperature": 0.7},
    "filters": {"temperature": 1.4, "top_k": 14, "top_p": 0.85, "min_p": 0.06},
    "penalties": {
        "temperature": 1.0,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.4,
    },
    "all": {
        "temperature": 1.2,
        "top_k": 15,
        "top_p": 0.9,
        "min_p": 0.03,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.5,
        "repetition_penalty": 0.8,
        "logit_bias": ((3, 2.0), (8, -1.0), (20, 1.0)),
        "suppressed_ids": (11, 20),
        "min_tokens": 50,
    },
}


def adjusted(logits, output, sampling):
    """By the order of the rules, one token at a time."""
    found = []
    for token, logit in enumerate(logits):
        logit = float(logit) + dict(sampling.get("logit_bias", ())).get(token, 0.0)
        if token in PROMPT or token in output:
            penalty = sampling.get("repetition_penalty", 1.0)
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.get("frequency_penalty", 0.0) * output.count(token)
        logit -= sampling.get("presence_penalty", 0.0) * (token in output)
        if token in sampling.get("suppressed_ids", ()):
            logit = -math.inf
        found.append(logit)
    return found


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name):
    sampling, output = CASES[name], [5, 8, 5, 3]
    logits = np.random.default_rng(3).normal(size=VOCABULARY).astype(np.float32) * 2
    bench = Bench(slots_count=500)
    slots = [bench.admit(output=output, seed=seed, **sampling) for seed in range(500)]
    rows = torch.tensor(logits).repeat(500, 1)
    drawn = []
    for batch in range(40):
        for slot in slots:
            slot.sampling = SlotSampling(**sampling, seed=slot.sampling.seed + 500, choice=batch)
        drawn += bench.sampler.draw(rows, slots).ids
    filters = {key: sampling[key] for key in ("top_k", "top_p", "min_p") if key in sampling}
    expected = drawn_probabilities(
        adjusted(logits, output, sampling), sampling["temperature"], **filters
    )
    assert len(drawn) == 20_000
    check_draws(drawn, expected)


def test_a_row_does_not_depend_on_its_neighbours():
    random = np.random.default_rng(4)
    logits = random.normal(size=(12, VOCABULARY)).astype(np.float32) * 2
    admissions = [
        {"output": (5, 8, 5), "seed": row, **CASES[name]}
        for row, name in enumerate(list(CASES) * 3)
    ]
    crowd = Bench()
    together = crowd.sample(logits, *(crowd.admit(**admission) for admission in admissions))
    for row, admission in enumerate(admissions):
        assert (Bench().draw_one(logits[row], **admission),) == together[row].token_ids


# ---------------------------------------------------------------- what a row returns


def test_each_row_gets_what_it_wants_of_the_raw_logits(bench):
    logits = [flat(i5=2.0, i6=1.0)] * 5
    wants = [
        RowWants(),
        RowWants(logprobs=True),
        RowWants(logprobs=True, top_tokens=2),
        RowWants(top_tokens=4),
        RowWants(logits=True),
    ]
    # A bias, and a temperature with filters: neither shows in a log-probability.
    slots = [
        bench.admit(wants=found, logit_bias=((6, 3.0),), temperature=0.2, top_k=1)
        for found in wants
    ]
    results = bench.sample(logits, *slots)
    assert [result.token_ids for result in results] == [(6,)] * 5
    total = math.exp(2.0) + math.e + VOCABULARY - 2
    expected = {5: 2.0 - math.log(total), 6: 1.0 - math.log(total), 0: -math.log(total)}
    assert [len(result.logprobs) for result in results] == [0, 1, 1, 1, 0]
    for result in results[1:4]:
        assert result.logprobs == pytest.approx((expected[6],), abs=1e-5)
    assert [len(result.tops) for result in results] == [0, 0, 1, 1, 0]
    assert results[2].tops[0].token_ids == (5, 6)
    assert results[3].tops[0].token_ids == (5, 6, 0, 1)
    assert results[3].tops[0].logprobs == pytest.approx(
        [expected[5], expected[6], expected[0], expected[0]], abs=1e-5
    )
    assert [result.logits is not None for result in results] == [False] * 4 + [True]


def test_more_tops_than_tokens_are_all_tokens(bench):
    (result,) = bench.sample([flat()], bench.admit(wants=RowWants(top_tokens=VOCABULARY + 9)))
    assert result.tops[0].token_ids == tuple(range(VOCABULARY))


def test_a_row_that_is_not_finite_says_so_and_scores_nothing(bench):
    wants = RowWants(logprobs=True, top_tokens=2)
    logits = [flat(i5=2.0), flat(i5=float("nan")), flat(i5=float("inf")), flat(i6=1.0)]
    results = bench.sample(logits, *(bench.admit(wants=wants) for _ in logits))
    assert [result.finite for result in results] == [True, False, False, True]
    assert [result.token_ids[0] for result in results] == [5, 0, 0, 6]
    assert [len(result.logprobs) + len(result.tops) for result in results] == [2, 0, 0, 2]
