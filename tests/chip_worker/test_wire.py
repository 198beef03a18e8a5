"""Both sides of the worker plane agree: what one encodes, the other decodes to the same values."""

import math
from dataclasses import replace

import pytest

from chip_worker import batch
from chip_worker import wire as worker_wire
from chip_worker.step_wire import MalformedMessage
from chip_worker.wire import Identity
from control_plane.dispatch import wire as control_wire
from control_plane.dispatch.wire import GroupSettings, Place
from control_plane.errors import ProtocolError
from control_plane.request import Sampling
from control_plane.scheduling import messages
from protos import worker_pb2

TERM, EPOCH = 1000, 5
SETTINGS = GroupSettings(16, 8, 64, None, "cover", 30.0)
IDENTITY = Identity(
    worker_id="chip0",
    incarnation=(1 << 64) - 1,
    pid=4711,
    backend="cpu",
    chip_index=2,
    chip_description="cores 0,1",
    memory_bytes=1 << 40,
    dtype="float32",
    batch_invariant=True,
    block_tokens_multiple=128,
    model_name="m",
    architecture="llama",
    model_digest="ab",
    context_tokens=2048,
    vocabulary_size=49152,
    kv_windows=(0, 512, 512),
    rows_max=96,
    device_id="0000:3b:00.0",
)
WORKER = messages.WorkerInfo("chip0", 11, 4711, "cpu", "", "float32", "ab", 2048, 49152)
TIMES = batch.StepTimes(3, queue_ns=1, device_ns=2_500_000_000, communication_ns=4, gap_ns=5)


def received(message: bytes) -> batch.Command:
    """As a worker whose model has three KV groups."""
    return worker_wire.decode_command(worker_pb2.AttachResponse.FromString(message), 99, 3)


def reported(report: batch.Report, rank: int = 0) -> messages.Event | None:
    message = worker_wire.encode_report(report)
    assert control_wire.decode_fence(message) == (TERM, EPOCH)
    return control_wire.decode_report(message, WORKER, Place("g0", EPOCH, rank))


def test_both_sides_speak_one_version():
    assert worker_wire.PROTOCOL_VERSION == control_wire.PROTOCOL_VERSION


def test_hello():
    hello = worker_wire.encode_hello(IDENTITY, TERM, "secret").hello
    worker = control_wire.decode_hello(hello)
    assert worker.incarnation == IDENTITY.incarnation
    assert (worker.worker_id, worker.pid, worker.backend) == ("chip0", 4711, "cpu")
    assert (worker.device, worker.dtype, worker.model_digest) == ("cores 0,1", "float32", "ab")
    assert (worker.context_tokens, worker.vocabulary_size) == (2048, 49152)
    assert (worker.block_tokens_multiple, worker.batch_invariant) == (128, True)
    assert worker.kv_windows == (0, 512, 512)
    assert (worker.rows_max, hello.chip.device_id) == (96, "0000:3b:00.0")
    assert worker.unavailable_reason is None
    assert (worker.term_highest, hello.join_token) == (TERM, "secret")
    assert not worker_wire.encode_hello(IDENTITY, 0, None).hello.HasField("join_token")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("burnt", "burnt"), ("", "no reason was given"), ("x" * 5000, "x" * 1000)],
)
def test_hello_of_a_worker_without_a_chip(reason, expected):
    identity = replace(IDENTITY, model_digest="", context_tokens=0, unavailable_reason=reason)
    worker = control_wire.decode_hello(worker_wire.encode_hello(identity, 0, None).hello)
    assert worker.unavailable_reason == expected


def test_step():
    sampling = Sampling(temperature=0.5, seed=(1 << 64) - 1, choice=2)
    plan = messages.StepPlan(
        group_id="g0",
        epoch=EPOCH,
        step_id=3,
        releases=(7, 1),
        admissions=(
            messages.Admission(
                1, (5, 6, 7), 2, 0, ((), (), ()), sampling, wants_logprobs=True, top_tokens=5
            ),
            messages.Admission(
                2, (), 0, 16, ((4, 8), (), (5,)), Sampling(0.0, 0), wants_logits=True, adapter=3
            ),
        ),
        extensions=((1, (8, 9)), (2, ()), (3, (10,))),
        drops=((1, 1, 3), (1, 2, 1), (3, 2, 70)),
        new_blocks=((1, 0, 11), (1, 2, 12), (2, 1, 0)),
        rows=(
            messages.StepRow(1, 5, False),
            messages.StepRow(2, 1, True),
            messages.StepRow(3, 1, True),
        ),
        digest=(1 << 32) - 1,
    )
    step = received(control_wire.encode_step(plan, TERM))
    assert isinstance(step, batch.Step)
    assert (step.term, step.epoch, step.step_id, step.received_ns) == (TERM, EPOCH, 3, 99)
    assert (step.releases, step.extensions) == (plan.releases, plan.extensions)
    assert (step.drops, step.new_blocks) == (plan.drops, plan.new_blocks)
    assert step.digest == plan.digest
    assert [(row.slot, row.tokens_count, row.sampled) for row in step.rows] == [
        (1, 5, False),
        (2, 1, True),
        (3, 1, True),
    ]
    assert step.admissions[0] == batch.Admission(
        slot=1,
        token_ids=(5, 6, 7),
        output_start=2,
        cached_count=0,
        block_tables=((), (), ()),
        sampling=batch.SlotSampling(0.5, (1 << 64) - 1, 2),
        wants=batch.RowWants(logprobs=True, top_tokens=5),
    )
    assert step.admissions[1] == batch.Admission(
        slot=2,
        token_ids=(),
        output_start=0,
        cached_count=16,
        block_tables=((4, 8), (), (5,)),
        sampling=batch.SlotSampling(0.0, 0),
        wants=batch.RowWants(logits=True),
        adapter=3,
    )


def admitted(sampling, **wants):
    """An admission as the worker gets it."""
    admission = messages.Admission(1, (5,), 1, 0, ((),), sampling, **wants)
    plan = messages.StepPlan("g0", EPOCH, 1, admissions=(admission,))
    return received(control_wire.encode_step(plan, TERM)).admissions[0]


# Every float is exact in float32.
EVERY_SAMPLING = {
    "temperature": 0.75,
    "seed": 9,
    "choice": 4,
    "top_k": 40,
    "top_p": 0.875,
    "min_p": 0.0625,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.25,
    "logit_bias": ((3, -100.0), (70_000, 0.5)),
    "suppressed_ids": (2, 49_151),
    "min_tokens": 12,
}


def test_every_field_of_sampling_arrives():
    assert set(EVERY_SAMPLING) == set(Sampling.__dataclass_fields__)
    assert admitted(Sampling(**EVERY_SAMPLING)).sampling == batch.SlotSampling(**EVERY_SAMPLING)


@pytest.mark.parametrize("name", sorted(set(EVERY_SAMPLING) - {"temperature", "seed"}))
def test_each_field_of_sampling_arrives_alone(name):
    changed = {"temperature": 0.5, "seed": 1, name: EVERY_SAMPLING[name]}
    assert admitted(Sampling(**changed)).sampling == batch.SlotSampling(**changed)


def test_a_top_p_of_zero_is_not_an_absent_one():
    assert admitted(Sampling(1.0, 0, top_p=0.0)).sampling.top_p == 0.0
    assert admitted(Sampling(1.0, 0)).sampling.top_p == 1.0


@pytest.mark.parametrize("prompt_top_tokens", [None, 0, 20])
def test_a_prompt_may_be_scored_without_tops(prompt_top_tokens):
    found = admitted(Sampling(0.0, 0), prompt_top_tokens=prompt_top_tokens)
    assert found.wants == batch.RowWants(prompt_top_tokens=prompt_top_tokens)


def test_an_absent_digest_is_not_zero():
    plan = messages.StepPlan("g0", EPOCH, 1)
    assert received(control_wire.encode_step(plan, TERM)).digest is None
    assert received(control_wire.encode_step(replace(plan, digest=0), TERM)).digest == 0


def test_a_decode_step_of_64_rows_stays_small():
    rows = tuple(messages.StepRow(slot, 1, True) for slot in range(64))
    plan = messages.StepPlan("g0", EPOCH, 12345, rows=rows, new_blocks=((3, 0, 999),) * 4, digest=1)
    assert len(control_wire.encode_step(plan, TERM)) < 300


@pytest.mark.parametrize(
    "tables", [((4, 5),), ((4, 5), (), ()), ((), (), (4,)), ((1,), (2,), (3,))]
)
def test_block_tables_of_an_admission(tables):
    admission = messages.Admission(1, (5,), 1, 0, tables, Sampling(0.0, 0))
    plan = messages.StepPlan("g0", EPOCH, 1, admissions=(admission,))
    (found,) = received(control_wire.encode_step(plan, TERM)).admissions
    assert found.block_tables == (*tables, (), ())[:3]


def test_blocks_without_kv_groups_are_of_group_0():
    admission = worker_pb2.Admission(block_ids=[7, 8])
    step = worker_pb2.Step(admissions=[admission], block_slot=[1, 2], block_id=[3, 4])
    found = received(worker_pb2.AttachResponse(step=step).SerializeToString())
    assert found.admissions[0].block_tables == ((7, 8), (), ())
    assert found.new_blocks == ((1, 0, 3), (2, 0, 4))


@pytest.mark.parametrize(("configured", "expected"), [(None, 2048), (512, 512), (4096, 2048)])
def test_form_group_and_its_context(configured, expected):
    effect = messages.FormGroup("chip0", 11, "g0", EPOCH, 1, 2, 60.0)
    settings = replace(SETTINGS, context_tokens=configured, vocabulary_tokens=32_000)
    form = received(control_wire.encode_form_group(effect, settings, WORKER, TERM))
    assert form == batch.FormGroup(
        TERM,
        "g0",
        EPOCH,
        1,
        2,
        60.0,
        16,
        8,
        64,
        expected,
        blocks_wanted=8 * expected // 16,
        kv_policy="cover",
        step_deadline_s=30.0,
        vocabulary_tokens=32_000,
    )


@pytest.mark.parametrize(
    ("windows", "blocks"),
    [
        ((0,), 3 * 32),
        ((0, 0), 3 * 64),
        # 64 tokens, from anywhere in a block on, are in 5; two more are kept behind the window.
        ((1,), 3 * (5 + 2)),
        ((0, 100, 100), 3 * (32 + 2 * (12 + 2))),
        # Never more than the context.
        ((0, 4096), 3 * (32 + 32)),
    ],
)
def test_slots_context_and_windows_say_how_many_blocks_are_wanted(windows, blocks):
    effect = messages.FormGroup("chip0", 11, "g0", EPOCH, 0, 1, 60.0, block_tokens=16, slots=3)
    settings = replace(SETTINGS, chunk_tokens=64, context_tokens=500)
    worker = replace(WORKER, kv_windows=windows)
    form = received(control_wire.encode_form_group(effect, settings, worker, TERM))
    assert isinstance(form, batch.FormGroup)
    assert form.blocks_wanted == blocks


def test_a_group_may_have_its_own_block_size_and_rows():
    effect = messages.FormGroup("chip0", 11, "g0", EPOCH, 0, 1, 60.0, block_tokens=128, slots=3)
    settings = replace(SETTINGS, probe_deadline_s=7.0)
    form = received(control_wire.encode_form_group(effect, settings, WORKER, TERM))
    assert isinstance(form, batch.FormGroup)
    assert (form.block_tokens, form.slots, form.probe_deadline_s) == (128, 3, 7.0)


def test_small_commands():
    assert received(control_wire.encode_rendezvous(EPOCH, b"\x00\xff", TERM)) == batch.Rendezvous(
        TERM, EPOCH, b"\x00\xff"
    )
    assert received(control_wire.encode_reset(EPOCH, "why", TERM)) == batch.ResetEpoch(
        TERM, EPOCH, "why"
    )
    assert received(control_wire.encode_shutdown("why", TERM)) == batch.Shutdown("why")


def test_result_with_rows_of_every_kind():
    rows = (
        batch.RowResult((5,), (-0.5,)),
        batch.RowResult((6,), ()),
        batch.RowResult((0,), (), finite=False),
        batch.RowResult((7,), (-1.0,), logits=b"\x00\x00\x80\x3f"),
        batch.RowResult((8,), (-1.0,), (batch.TopTokens((9, 8), (-0.5, -1.0)),)),
        batch.RowResult((8,), (-1.0,), (batch.TopTokens((8,), (-math.inf,)),)),
    )
    done = reported(batch.StepResult(TERM, EPOCH, 3, rows, TIMES))
    assert isinstance(done, messages.StepDone)
    assert (done.worker_id, done.incarnation, done.group_id) == ("chip0", 11, "g0")
    assert (done.epoch, done.step_id, done.device_s) == (EPOCH, 3, 2.5)
    assert [(row.token_ids, row.logprobs, row.finite, row.logits) for row in done.results] == [
        (row.token_ids, row.logprobs, row.finite, row.logits) for row in rows
    ]
    assert [tops_of(row) for row in done.results] == [tops_of(row) for row in rows]
    assert done.prompt_scores == ()


def tops_of(found):
    return [(top.token_ids, top.logprobs) for top in found.tops]


def test_prompt_scores_of_every_kind():
    def tops(*lengths):
        return tuple(
            batch.TopTokens(tuple(range(length)), (-0.5 * length,) * length) for length in lengths
        )

    scores = (
        batch.PromptScores((-0.5, -0.25), tops(3, 3)),
        batch.PromptScores(()),
        batch.PromptScores((-4.0, -math.inf, -1.0)),
        batch.PromptScores((-8.0,), tops(1)),
    )
    done = reported(batch.StepResult(TERM, EPOCH, 3, (), TIMES, scores))
    assert [found.logprobs for found in done.prompt_scores] == [row.logprobs for row in scores]
    assert [tops_of(found) for found in done.prompt_scores] == [tops_of(row) for row in scores]


def test_a_plain_result_sends_no_column_it_does_not_need():
    rows = tuple(batch.RowResult((token_id,), ()) for token_id in range(4))
    result = worker_wire.encode_report(batch.StepResult(TERM, EPOCH, 3, rows, TIMES)).result
    assert not result.logprobs
    assert not result.status
    assert not result.logits
    assert not result.top_count
    assert not result.prompt_logprob_count


def test_other_reports():
    assert reported(batch.Rendezvous(TERM, EPOCH, b"here")) == messages.RendezvousOpened(
        "chip0", 11, EPOCH, b"here"
    )
    assert reported(batch.Ready(TERM, EPOCH, 64, 100.0, 0.25, 2, 10)) == messages.WorkerReady(
        "chip0", 11, EPOCH, 64, 100.0, 0.25
    )
    assert reported(batch.StepAck(TERM, EPOCH, (TIMES,)), rank=1) is None


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (batch.FaultKind.DEVICE, messages.LossKind.DEVICE),
        (batch.FaultKind.OUT_OF_MEMORY, messages.LossKind.DEVICE),
        (batch.FaultKind.PEER, messages.LossKind.PEER),
        (batch.FaultKind.DIVERGED, messages.LossKind.DIVERGED),
        (batch.FaultKind.MODEL, messages.LossKind.MODEL),
        (batch.FaultKind.INTERNAL, messages.LossKind.INTERNAL),
    ],
)
def test_faults_keep_their_blame(kind, loss):
    fault = reported(batch.Fault(TERM, EPOCH, 3, kind, "because"))
    assert fault == messages.WorkerFaulted("chip0", 11, EPOCH, loss, "because")
    last = reported(batch.Fault(TERM, EPOCH, 3, kind, "because", exiting=True))
    assert last == replace(fault, exiting=True)


# ---------------------------------------------------------------- malformed messages


@pytest.mark.parametrize(
    "result",
    [
        worker_pb2.StepResult(token_count=[1, 1], token_ids=[5]),
        worker_pb2.StepResult(token_count=[1]),
        worker_pb2.StepResult(token_count=[1], token_ids=[5], logprobs=[-1, -2]),
        worker_pb2.StepResult(token_count=[1], token_ids=[5], status=[0, 0]),
        worker_pb2.StepResult(token_count=[1], token_ids=[5], logits=[b"", b""]),
    ],
    ids=["too few ids", "no ids", "logprobs", "status", "logits"],
)
def test_results_whose_columns_do_not_fit_are_refused(result):
    with pytest.raises(ProtocolError, match="entries"):
        control_wire.decode_report(
            worker_pb2.AttachRequest(result=result), WORKER, Place("g0", EPOCH, 0)
        )


def test_tokens_of_a_rank_above_0_are_refused():
    with pytest.raises(ProtocolError, match="rank 1"):
        reported(batch.StepResult(TERM, EPOCH, 1, (), TIMES), rank=1)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_ready_with_an_impossible_rate_is_refused(rate):
    with pytest.raises(ProtocolError, match="above zero"):
        reported(batch.Ready(TERM, EPOCH, 64, rate, 0.25, 2, 10))


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.AttachResponse(),
        worker_pb2.AttachResponse(mask=worker_pb2.StepMask()),
        worker_pb2.AttachResponse(step=worker_pb2.Step(row_slot=[1])),
        worker_pb2.AttachResponse(step=worker_pb2.Step(block_slot=[1], block_id=[1, 2])),
        worker_pb2.AttachResponse(step=worker_pb2.Step(extension_slot=[1], extension_count=[2])),
        worker_pb2.AttachResponse(
            step=worker_pb2.Step(row_slot=[1], row_tokens=[1], sampled_row=[1])
        ),
        worker_pb2.AttachResponse(
            step=worker_pb2.Step(block_slot=[1, 1], block_id=[1, 2], block_kv_group=[1])
        ),
        worker_pb2.AttachResponse(step=worker_pb2.Step(block_kv_group=[1])),
        worker_pb2.AttachResponse(step=worker_pb2.Step(drop_slot=[1], drop_kv_group=[1])),
        worker_pb2.AttachResponse(step=worker_pb2.Step(drop_slot=[1], drop_count=[1])),
        worker_pb2.AttachResponse(step=worker_pb2.Step(drop_kv_group=[1], drop_count=[1])),
        *(
            worker_pb2.AttachResponse(step=worker_pb2.Step(admissions=[admission]))
            for admission in (
                worker_pb2.Admission(block_ids=[1, 2], block_kv_group=[0]),
                worker_pb2.Admission(block_ids=[1, 2], block_kv_group=[1, 0]),
                worker_pb2.Admission(block_ids=[1], block_kv_group=[3]),
            )
        ),
        worker_pb2.AttachResponse(form=worker_pb2.FormGroup(group_epoch=1)),
        worker_pb2.AttachResponse(
            form=worker_pb2.FormGroup(
                group_epoch=1, layout=worker_pb2.GroupLayout(tensor_size=1), slots=8
            )
        ),
        worker_pb2.AttachResponse(
            step=worker_pb2.Step(
                admissions=[
                    worker_pb2.Admission(sampling=worker_pb2.SlotSampling(bias_token_id=[1]))
                ]
            )
        ),
    ],
    ids=[
        "empty",
        "mask",
        "rows",
        "blocks",
        "extensions",
        "sampled",
        "groups of too few blocks",
        "groups of no blocks",
        "drops without counts",
        "drops without groups",
        "drops without slots",
        "groups of too few cached blocks",
        "groups that do not ascend",
        "a group the model lacks",
        "no rank",
        "no blocks wanted",
        "bias",
    ],
)
def test_commands_of_the_wrong_shape_are_refused(message):
    with pytest.raises(MalformedMessage):
        worker_wire.decode_command(message, 0, 3)
