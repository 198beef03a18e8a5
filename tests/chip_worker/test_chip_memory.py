"""The worker leaves chip memory to the chip: it computes the same where no contents are seen."""

import dataclasses

import pytest
import torch

from backends.cpu.plugin import CpuBackend
from backends.interface import Lifetime
from chip_worker.batch import RowWants, SlotSampling, StepRow
from chip_worker.models import summed_projection
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, admission
from tests.fakes.late_chip import LateRuntime
from tests.fakes.tiny_gemma import TinyGemma

MODEL = TinyLlama(query_heads=6, kv_heads=3, tied=False, vocabulary=256, seed=5)
PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50]
BLOCKS = 8
DRAWN = SlotSampling(
    temperature=0.9,
    seed=2**63 + 5,
    top_k=30,
    top_p=0.95,
    logit_bias=((7, 1.5),),
    presence_penalty=0.4,
    repetition_penalty=1.2,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), MODEL)


@pytest.fixture(scope="module")
def windows_path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("windows"), TinyGemma(layers=6))


def blocks(*slots, kv_groups=1):
    return tuple(
        (slot, kv_group, (slot * kv_groups + kv_group) * BLOCKS + block)
        for slot in slots
        for kv_group in range(kv_groups)
        for block in range(BLOCKS)
    )


def everything(group):
    """Steps that use all there is: chunks, scores, adjustments, tops, raw logits, a decode."""
    every = RowWants(logprobs=True, top_tokens=3, prompt_top_tokens=2, logits=True)
    admitted = (
        admission(PROMPT, wants=every),
        admission(PROMPT[:5], slot=1, sampling=DRAWN, wants=RowWants()),
        admission(PROMPT[3:], slot=2, sampling=DRAWN, wants=every),
    )
    windows = group.ranks[0].session.kv_windows
    results = [
        group.result(
            admissions=admitted,
            new_blocks=blocks(0, 1, 2, kv_groups=len(windows)),
            rows=(StepRow(0, 9, False), StepRow(1, 5, True), StepRow(2, 14, True)),
        )
    ]
    results += [group.result(rows=(StepRow(0, 8, True), StepRow(2, 1, True), StepRow(1, 1, True)))]
    # 17 tokens behind it, and a window of 11 at most.
    drops = tuple((0, kv_group, 1) for kv_group, window in enumerate(windows) if window)
    for each in (drops, (), ()):
        rows = tuple(StepRow(slot, 1, True) for slot in (2, 1, 0))
        results += [group.result(drops=each, rows=rows)]
    return [(result.rows, result.prompt_scores) for result in results]


def asynchronous():
    """A cpu backend that says of its collectives what those of accelerators are."""
    backend = CpuBackend()
    backend.capabilities = dataclasses.replace(backend.capabilities, async_collectives=True)
    return backend


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_but_the_chip_reads_or_writes_its_memory(path, windows_path, ranks, windows):
    found = windows_path if windows else path
    expected = everything(ComputeGroup.open(found, ranks).form(vocabulary_tokens=190))
    late = ComputeGroup.open(found, ranks, runtime_class=LateRuntime)
    assert everything(late.form(vocabulary_tokens=190)) == expected


def test_sums_that_travel_in_chunks_are_the_same_sums(path, monkeypatch):
    expected = everything(ComputeGroup.open(path, 2).form())
    monkeypatch.setattr(summed_projection, "CHUNK_TOKENS", 5)
    late = ComputeGroup.open(path, 2, backend=asynchronous(), runtime_class=LateRuntime).form()
    seen = watch_sums(late)
    found = everything(late)
    # 28 tokens in the first step: of the embedding, then of both projections in two layers.
    assert seen[:11] == [28, 5, 5, 5, 5, 8, 5, 5, 5, 5, 8]
    for (rows, scores), (rows_expected, scores_expected) in zip(found, expected, strict=True):
        assert [row.token_ids for row in rows] == [row.token_ids for row in rows_expected]
        for row, row_expected in zip(rows, rows_expected, strict=True):
            assert row.logprobs == pytest.approx(row_expected.logprobs, abs=1e-4)
        for score, score_expected in zip(scores, scores_expected, strict=True):
            assert score.logprobs == pytest.approx(score_expected.logprobs, abs=1e-4)


def watch_sums(group):
    """Tokens of each sum of rank 0, in order."""
    communicator = group.ranks[0].session._formation._communicator
    all_reduce, seen = communicator.all_reduce, []

    def watched(tensor):
        seen.append(tensor.shape[0])
        return all_reduce(tensor)

    communicator.all_reduce = watched
    return seen


# ---------------------------------------------------------------- scratch


def held(group):
    return [rank.session._device.scratch for rank in group.ranks]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_leaves_no_scratch_and_the_epoch_its_tables_and_programs_only(path, ranks):
    group = ComputeGroup.open(path, ranks).form()
    tables = [scratch.bytes_by_operation() for scratch in held(group)]
    assert [set(each) for each in tables] == [{"rotary", "capture"}] * ranks
    everything(group)
    assert [scratch.bytes_by_operation() for scratch in held(group)] == tables
    for rank in group.ranks:
        rank.session.close()
    assert [scratch.bytes_by_operation() for scratch in held(group)] == [{}] * ranks


def test_many_shapes_need_the_scratch_of_the_largest(path):
    group = ComputeGroup.open(path, 2).form()
    everything(group)
    peak = [scratch.bytes_held for scratch in held(group)]
    for length in range(1, 30):
        group.result(
            admissions=(admission([5] * length, slot=3),),
            new_blocks=blocks(3),
            rows=(StepRow(3, length, True),),
        )
        group.result(releases=(3,))
    assert [scratch.bytes_held for scratch in held(group)] == peak


class RequestEnds(CpuBackend):
    """Remembers of each ended request what its slot had of chip memory then."""

    def __init__(self):
        super().__init__()
        self.ended = []
        self.scratch = None

    def on_request_end(self, slot):
        self.ended.append((slot, self.scratch.bytes_by_operation().get("kept", 0)))


def test_what_a_request_kept_ends_before_the_next_one_in_its_slot_computes(path):
    backend = RequestEnds()
    group = ComputeGroup.open(path, backend=backend).form()
    (scratch,) = held(group)
    backend.scratch = scratch
    rows = (StepRow(1, 3, True),)
    group.result(admissions=(admission([1, 2, 3], slot=1),), new_blocks=blocks(1), rows=rows)
    scratch.take(Lifetime.REQUEST, "kept", (100,), torch.float32, slot=1)
    scratch.take(Lifetime.REQUEST, "kept", (100,), torch.float32, slot=2)
    both = scratch.bytes_by_operation()["kept"]
    group.result(
        releases=(1,),
        admissions=(admission([1, 2, 3], slot=1),),
        new_blocks=blocks(1),
        rows=rows,
    )
    assert backend.ended == [(1, both // 2)]
