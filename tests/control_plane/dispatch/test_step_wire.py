"""What a step says to a worker and what its result says back, through both sides' wire modules."""

import math
from dataclasses import replace

import pytest

from chip_worker import batch
from chip_worker import wire as worker_wire
from control_plane.dispatch import wire
from control_plane.dispatch.wire import GroupSettings, Place
from control_plane.errors import ProtocolError
from control_plane.request import Sampling
from control_plane.scheduling.messages import (
    Admission,
    FormGroup,
    PromptScores,
    RowResult,
    StepDone,
    StepPlan,
    TopTokens,
)
from protos import worker_pb2
from tests.fakes.driven_core import worker_info

TERM = 7
PLACE = Place("g0", 3, 0)
EVERYTHING = Sampling(
    temperature=0.5,
    seed=2**64 - 1,
    choice=3,
    top_k=40,
    top_p=0.5,
    min_p=0.25,
    presence_penalty=-2.0,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    logit_bias=((3, -100.0), (8, 2.5)),
    suppressed_ids=(2, 5),
    min_tokens=4,
)


def received(plan: StepPlan, kv_groups_count: int = 1) -> batch.Step:
    message = worker_pb2.AttachResponse.FromString(wire.encode_step(plan, TERM))
    command = worker_wire.decode_command(message, 0, kv_groups_count)
    assert isinstance(command, batch.Step)
    return command


def admission(sampling: Sampling, **wants) -> Admission:
    return Admission(2, (5, 6, 7), 3, 0, ((),), sampling, **wants)


def admitted(sampling: Sampling, **wants) -> batch.Admission:
    return received(StepPlan("g0", 3, 1, admissions=(admission(sampling, **wants),))).admissions[0]


def reported(*rows: batch.RowResult, scores: tuple[batch.PromptScores, ...] = ()) -> StepDone:
    times = batch.StepTimes(1, device_ns=2_000_000)
    report = batch.StepResult(TERM, 3, 1, rows, times, scores)
    message = worker_pb2.AttachRequest.FromString(
        worker_wire.encode_report(report).SerializeToString()
    )
    done = wire.decode_report(message, worker_info("chip0"), PLACE)
    assert isinstance(done, StepDone)
    return done


@pytest.mark.parametrize("sampling", [EVERYTHING, Sampling(0.0, 0), Sampling(1.0, 5, top_p=0.0)])
def test_a_worker_reads_how_tokens_are_drawn(sampling) -> None:
    got = admitted(sampling).sampling
    assert got == batch.SlotSampling(
        **{name: getattr(sampling, name) for name in sampling.__slots__}
    )


def test_what_is_the_default_costs_no_byte() -> None:
    plain = StepPlan("g0", 3, 1, admissions=(admission(Sampling(0.0, 1)),))
    message = worker_pb2.AttachResponse.FromString(wire.encode_step(plain, TERM))
    sampling = message.step.admissions[0].sampling
    assert [field.name for field, _ in sampling.ListFields()] == ["seed"]
    assert message.step.admissions[0].wants.ByteSize() == 0


@pytest.mark.parametrize(
    "wants",
    [
        {},
        {"top_tokens": 5, "wants_logprobs": True},
        {"prompt_top_tokens": 0},
        {"prompt_top_tokens": 3, "wants_logits": True},
    ],
)
def test_a_worker_reads_what_is_wanted(wants) -> None:
    assert admitted(Sampling(0.0, 1), **wants).wants == batch.RowWants(
        logprobs=wants.get("wants_logprobs", False),
        top_tokens=wants.get("top_tokens", 0),
        prompt_top_tokens=wants.get("prompt_top_tokens"),
        logits=wants.get("wants_logits", False),
    )


def test_a_worker_reads_the_blocks_of_every_kv_group() -> None:
    tables = ((4, 5, 6), (), (9,))
    cached = replace(admission(Sampling(0.0, 1)), block_tables=tables)
    drops, new_blocks = ((1, 2, 3), (4, 1, 1)), ((1, 0, 7), (1, 2, 8), (4, 1, 3))
    plan = StepPlan("g0", 3, 1, admissions=(cached,), drops=drops, new_blocks=new_blocks)
    step = received(plan, kv_groups_count=3)
    assert step.admissions[0].block_tables == tables
    assert step.drops == drops
    assert step.new_blocks == new_blocks


def test_a_model_without_windows_costs_no_byte_for_kv_groups() -> None:
    cached = replace(admission(Sampling(0.0, 1)), block_tables=((4, 5),))
    plan = StepPlan("g0", 3, 1, admissions=(cached,), new_blocks=((1, 0, 7), (2, 0, 8)))
    step = worker_pb2.AttachResponse.FromString(wire.encode_step(plan, TERM)).step
    assert not step.block_kv_group
    assert not step.admissions[0].block_kv_group
    assert received(plan).new_blocks == plan.new_blocks


def hello(kv_windows: list[int]) -> worker_pb2.Hello:
    model = worker_pb2.ModelFingerprint(digest="d", kv_window=kv_windows)
    return worker_pb2.Hello(
        worker_id="chip0", incarnation=1, protocol_version=wire.PROTOCOL_VERSION, model=model
    )


@pytest.mark.parametrize(
    ("sent", "known"), [([], (0,)), ([0], (0,)), ([0, 512, 512], (0, 512, 512)), ([7], (7,))]
)
def test_a_worker_tells_the_windows_of_its_model(sent, known) -> None:
    assert wire.decode_hello(hello(sent)).kv_windows == known


def test_more_kv_groups_than_a_model_can_have_break_the_protocol() -> None:
    with pytest.raises(ProtocolError, match=r"names 257 KV groups in kv_window; give at most 256"):
        wire.decode_hello(hello([8] * 257))


@pytest.mark.parametrize("vocabulary_tokens", [0, 49152])
def test_a_worker_learns_the_vocabulary(vocabulary_tokens) -> None:
    settings = GroupSettings(16, 8, 64, None, "cover", 30.0, vocabulary_tokens)
    effect = FormGroup("chip0", 1, "g0", 3, 0, 1, 60.0)
    sent = wire.encode_form_group(effect, settings, worker_info("chip0"), TERM)
    form = worker_wire.decode_command(worker_pb2.AttachResponse.FromString(sent), 0)
    assert isinstance(form, batch.FormGroup)
    assert form.vocabulary_tokens == vocabulary_tokens


def test_each_row_brings_what_it_was_asked_for() -> None:
    listed = batch.TopTokens((4, 9), (-0.5, -math.inf))
    done = reported(
        batch.RowResult((1,), ()),
        batch.RowResult((4,), (-0.5,), (listed,)),
        batch.RowResult((0,), (), finite=False),
        batch.RowResult((2,), (-math.inf,)),
    )
    assert done.results == (
        RowResult((1,)),
        RowResult((4,), (-0.5,), (TopTokens((4, 9), (-0.5, -math.inf)),)),
        RowResult((0,), finite=False),
        RowResult((2,), (-math.inf,)),
    )
    assert done.prompt_scores == ()
    assert done.device_s == 0.002


def test_scores_of_prompts_come_row_by_row() -> None:
    tops = (batch.TopTokens((4, 9), (-0.5, -1.5)), batch.TopTokens((8, 1), (-0.25, -2.5)))
    done = reported(
        scores=(
            batch.PromptScores((-1.0,)),
            batch.PromptScores((-0.5, -3.0), tops),
            batch.PromptScores(()),
        )
    )
    assert done.results == ()
    assert done.prompt_scores == (
        PromptScores((-1.0,)),
        PromptScores(
            (-0.5, -3.0), (TopTokens((4, 9), (-0.5, -1.5)), TopTokens((8, 1), (-0.25, -2.5)))
        ),
        PromptScores(()),
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"token_count": [1], "token_ids": []},
        {"token_count": [1], "token_ids": [1], "logprobs": [0.0, 0.0]},
        {
            "token_count": [1],
            "token_ids": [1],
            "top_count": [1, 0],
            "top_ids": [1],
            "top_logprobs": [0.0],
        },
        {"token_count": [1], "token_ids": [1], "top_count": [2], "top_ids": [1]},
        {"token_count": [1], "token_ids": [1], "top_count": [1], "top_ids": [1]},
        {"token_count": [1], "token_ids": [1], "top_ids": [1], "top_logprobs": [0.0]},
        {"prompt_logprob_count": [2], "prompt_logprobs": [0.0]},
        {"prompt_logprobs": [0.0]},
        {"prompt_logprob_count": [1, 0], "prompt_logprobs": [0.0], "prompt_top_count": [0]},
        {"prompt_logprob_count": [2**32 - 1], "prompt_top_count": [2**32 - 1]},
        {
            "prompt_logprob_count": [2],
            "prompt_logprobs": [0.0, 0.0],
            "prompt_top_count": [1],
            "prompt_top_ids": [1],
            "prompt_top_logprobs": [0.0],
        },
        {"prompt_top_count": [1], "prompt_top_ids": [1], "prompt_top_logprobs": [0.0]},
        {"prompt_top_ids": [1], "prompt_top_logprobs": [0.0]},
    ],
)
def test_columns_that_do_not_fit_break_the_protocol(columns) -> None:
    result = worker_pb2.StepResult(term=TERM, group_epoch=3, step_id=1, **columns)
    message = worker_pb2.AttachRequest(result=result)
    with pytest.raises(ProtocolError, match="entries"):
        wire.decode_report(message, worker_info("chip0"), PLACE)


def test_tokens_alone_go_to_their_rows() -> None:
    done = reported(batch.RowResult((7,), ()), batch.RowResult((), ()), batch.RowResult((8, 9), ()))
    assert done.results == (RowResult((7,)), RowResult(()), RowResult((8, 9)))
