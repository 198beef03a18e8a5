"""Conversion between the scheduling core's records and the messages of protos/worker.proto.

    effects  --encode_*-->  bytes of an AttachResponse     AttachRequest  --decode_*-->  events

Encoders return bytes, so that a step is serialized once and the same bytes go to every rank.
Decoders check shape; whether a message is of the right term and epoch, its stream checks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from control_plane.config import BLOCKS_MAX
from control_plane.errors import ProtocolError
from control_plane.request import Sampling
from control_plane.scheduling.kv_groups import KVGroups
from control_plane.scheduling.messages import (
    Admission,
    Event,
    FormGroup,
    LossKind,
    PromptScores,
    RendezvousOpened,
    RowResult,
    StepDone,
    StepPlan,
    TopTokens,
    WorkerFaulted,
    WorkerInfo,
    WorkerReady,
)
from protos import worker_pb2

PROTOCOL_VERSION = 1
WORKER_ID_CHARACTERS_MAX = 128
REASON_CHARACTERS_MAX = 1000
"""A reason is kept and shown for as long as the worker's name is known."""
KV_GROUPS_MAX = 256
"""Each costs a block table for every request."""

_LOSS_KINDS = {
    worker_pb2.FAULT_KIND_DEVICE: LossKind.DEVICE,
    worker_pb2.FAULT_KIND_OUT_OF_MEMORY: LossKind.DEVICE,
    worker_pb2.FAULT_KIND_PEER: LossKind.PEER,
    worker_pb2.FAULT_KIND_DIVERGED: LossKind.DIVERGED,
    worker_pb2.FAULT_KIND_MODEL: LossKind.MODEL,
}


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What every FormGroup says besides the place; see protos/worker.proto.

    block_tokens and slots: of a group for which the core names no other number.
    """

    block_tokens: int
    slots: int
    chunk_tokens: int
    context_tokens: int | None
    kv_policy: str
    step_deadline_s: float
    vocabulary_tokens: int = 0
    probe_deadline_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker was last told to be: a rank of a group for one epoch."""

    group_id: str
    epoch: int
    rank: int


# ---------------------------------------------------------------- to the worker


def encode_welcome(term: int, heartbeat_interval_s: float, lease_s: float) -> bytes:
    """Accepts a worker."""
    welcome = worker_pb2.Welcome(
        term=term, heartbeat_interval_s=heartbeat_interval_s, lease_s=lease_s
    )
    return worker_pb2.AttachResponse(welcome=welcome).SerializeToString()


def encode_form_group(
    effect: FormGroup, settings: GroupSettings, worker: WorkerInfo, term: int
) -> bytes:
    """Makes a worker a rank; without a configured context the model's own holds."""
    context_tokens = worker.context_tokens
    if settings.context_tokens is not None:
        context_tokens = min(context_tokens, settings.context_tokens)
    block_tokens = effect.block_tokens or settings.block_tokens
    slots = effect.slots or settings.slots
    kv = KVGroups(worker.kv_windows, block_tokens, settings.chunk_tokens)
    form = worker_pb2.FormGroup(
        term=term,
        group_id=effect.group_id,
        group_epoch=effect.epoch,
        layout=worker_pb2.GroupLayout(tensor_rank=effect.rank, tensor_size=effect.world_size),
        deadline_s=effect.deadline_s,
        block_tokens=block_tokens,
        slots=slots,
        chunk_tokens=settings.chunk_tokens,
        context_tokens=context_tokens,
        kv_policy=settings.kv_policy,
        step_deadline_s=settings.step_deadline_s,
        vocabulary_tokens=settings.vocabulary_tokens,
        probe_deadline_s=settings.probe_deadline_s,
        blocks_wanted=slots * kv.cost(context_tokens),
    )
    return worker_pb2.AttachResponse(form=form).SerializeToString()


def encode_rendezvous(epoch: int, address: bytes, term: int) -> bytes:
    """Gives rank 0's meeting point to another rank."""
    rendezvous = worker_pb2.Rendezvous(term=term, group_epoch=epoch, address=address)
    return worker_pb2.AttachResponse(rendezvous=rendezvous).SerializeToString()


def encode_reset(epoch: int, reason: str, term: int) -> bytes:
    """Ends the epoch a worker is in."""
    reset = worker_pb2.ResetEpoch(term=term, group_epoch=epoch, reason=reason)
    return worker_pb2.AttachResponse(reset=reset).SerializeToString()


def encode_shutdown(reason: str, term: int) -> bytes:
    """Asks a worker to leave."""
    shutdown = worker_pb2.Shutdown(term=term, reason=reason)
    return worker_pb2.AttachResponse(shutdown=shutdown).SerializeToString()


def encode_step(plan: StepPlan, term: int) -> bytes:
    """A step, the same bytes for every rank of its group."""
    slots, tokens_counts, sampled = zip(*plan.rows, strict=True) if plan.rows else ((), (), ())
    step = worker_pb2.Step(
        term=term,
        group_epoch=plan.epoch,
        step_id=plan.step_id,
        release_slot=plan.releases,
        admissions=[_encode_admission(admission) for admission in plan.admissions],
        extension_slot=[slot for slot, _ in plan.extensions],
        extension_count=[len(ids) for _, ids in plan.extensions],
        extension_ids=[token_id for _, ids in plan.extensions for token_id in ids],
        block_slot=[slot for slot, _, _ in plan.new_blocks],
        block_id=[block_id for _, _, block_id in plan.new_blocks],
        block_kv_group=_encode_kv_groups([kv_group for _, kv_group, _ in plan.new_blocks]),
        drop_slot=[slot for slot, _, _ in plan.drops],
        drop_kv_group=[kv_group for _, kv_group, _ in plan.drops],
        drop_count=[count for _, _, count in plan.drops],
        row_slot=slots,
        row_tokens=tokens_counts,
        sampled_row=[index for index, draws in enumerate(sampled) if draws],
        state_digest=plan.digest,
    )
    return worker_pb2.AttachResponse(step=step).SerializeToString()


def _encode_kv_groups(kv_groups: list[int]) -> list[int]:
    """The KV groups of a column of blocks; none is all of group 0."""
    return kv_groups if any(kv_groups) else []


def _encode_admission(admission: Admission) -> worker_pb2.Admission:
    tables = admission.block_tables
    kv_groups = [kv_group for kv_group, block_ids in enumerate(tables) for _ in block_ids]
    return worker_pb2.Admission(
        slot=admission.slot,
        token_ids=admission.token_ids,
        output_start=admission.output_start,
        cached_count=admission.cached_count,
        block_ids=[block_id for block_ids in tables for block_id in block_ids],
        block_kv_group=_encode_kv_groups(kv_groups),
        sampling=_encode_sampling(admission.sampling),
        wants=worker_pb2.RowWants(
            logprob=admission.wants_logprobs,
            logits=admission.wants_logits,
            top_tokens=admission.top_tokens,
            prompt_logprobs=admission.prompt_top_tokens is not None,
            prompt_top_tokens=admission.prompt_top_tokens or 0,
        ),
        adapter=admission.adapter,
    )


def _encode_sampling(sampling: Sampling) -> worker_pb2.SlotSampling:
    """What differs from the default; absent fields change nothing."""
    return worker_pb2.SlotSampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        choice=sampling.choice,
        top_k=sampling.top_k or None,
        top_p=None if sampling.top_p == 1 else sampling.top_p,
        min_p=sampling.min_p or None,
        presence_penalty=sampling.presence_penalty or None,
        frequency_penalty=sampling.frequency_penalty or None,
        repetition_penalty=None
        if sampling.repetition_penalty == 1
        else sampling.repetition_penalty,
        bias_token_id=[token_id for token_id, _ in sampling.logit_bias],
        bias=[bias for _, bias in sampling.logit_bias],
        suppressed_token_ids=sampling.suppressed_ids,
        min_tokens=sampling.min_tokens,
    )


# ---------------------------------------------------------------- from the worker


def decode_hello(hello: worker_pb2.Hello) -> WorkerInfo:
    """Raises ProtocolError for another protocol version or a Hello without an identity."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"worker {hello.worker_id!r} speaks protocol version {hello.protocol_version}, this "
            f"control plane speaks {PROTOCOL_VERSION}; install the same Polychip on both sides"
        )
    if not 0 < len(hello.worker_id) <= WORKER_ID_CHARACTERS_MAX:
        raise ProtocolError(
            f"worker_id has {len(hello.worker_id)} characters; give it 1 to "
            f"{WORKER_ID_CHARACTERS_MAX}"
        )
    if hello.incarnation == 0:
        raise ProtocolError(f"worker {hello.worker_id!r} names no incarnation")
    return WorkerInfo(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        pid=hello.pid,
        backend=hello.chip.backend,
        device=hello.chip.description,
        dtype=hello.chip.dtype,
        model_digest=hello.model.digest,
        context_tokens=hello.model.context_tokens,
        vocabulary_size=hello.model.vocabulary_size,
        block_tokens_multiple=max(1, hello.chip.block_tokens_multiple),
        term_highest=hello.term_highest,
        batch_invariant=hello.chip.batch_invariant,
        rows_max=hello.chip.rows_max,
        kv_windows=_decode_kv_windows(hello),
        unavailable_reason=_decode_reason(hello),
        device_id=hello.chip.device_id,
        chip_index=hello.chip.index,
    )


def _decode_kv_windows(hello: worker_pb2.Hello) -> tuple[int, ...]:
    """The windows of its model's KV groups. Raises ProtocolError for more than a model can have."""
    kv_windows = hello.model.kv_window
    if len(kv_windows) > KV_GROUPS_MAX:
        raise ProtocolError(
            f"worker {hello.worker_id!r} names {len(kv_windows)} KV groups in kv_window; give at "
            f"most {KV_GROUPS_MAX}"
        )
    return tuple(kv_windows) or (0,)


def _decode_reason(hello: worker_pb2.Hello) -> str | None:
    """Why the worker has no chip; None if it has one."""
    if not hello.HasField("unavailable_reason"):
        return None
    return hello.unavailable_reason[:REASON_CHARACTERS_MAX] or "no reason was given"


def decode_fence(message: worker_pb2.AttachRequest) -> tuple[int, int]:
    """(term, epoch) a report belongs to. Raises ProtocolError if it is no report."""
    match message.WhichOneof("kind"):
        case "rendezvous":
            return message.rendezvous.term, message.rendezvous.group_epoch
        case "ready":
            return message.ready.term, message.ready.group_epoch
        case "result":
            return message.result.term, message.result.group_epoch
        case "ack":
            return message.ack.term, message.ack.group_epoch
        case "fault":
            return message.fault.term, message.fault.group_epoch
        case kind:
            raise ProtocolError(f"a worker may not send {kind or 'an empty message'} here")


def decode_report(
    message: worker_pb2.AttachRequest, worker: WorkerInfo, place: Place
) -> Event | None:
    """The event a report of this worker in this place means; None for an acknowledgement.

    Raises ProtocolError.
    """
    worker_id, incarnation = worker.worker_id, worker.incarnation
    match message.WhichOneof("kind"):
        case "rendezvous":
            return RendezvousOpened(worker_id, incarnation, place.epoch, message.rendezvous.address)
        case "ready":
            return _decode_ready(message.ready, worker, place)
        case "result":
            return _decode_result(message.result, worker, place)
        case "fault":
            return decode_fault(message.fault, worker)
        case "ack":
            return None
        case kind:
            raise ProtocolError(f"a worker may not send {kind or 'an empty message'} here")


def decode_fault(fault: worker_pb2.Fault, worker: WorkerInfo) -> WorkerFaulted:
    """What a worker says of its end in an epoch, or of the end of its process."""
    return WorkerFaulted(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        epoch=fault.group_epoch,
        kind=_LOSS_KINDS.get(fault.kind, LossKind.INTERNAL),
        message=fault.message[:REASON_CHARACTERS_MAX],
        exiting=fault.exiting,
    )


def _decode_ready(ready: worker_pb2.Ready, worker: WorkerInfo, place: Place) -> WorkerReady:
    rates = (ready.prefill_tokens_per_s, ready.decode_step_s)
    if not 1 <= ready.blocks <= BLOCKS_MAX or not all(
        math.isfinite(rate) and rate > 0 for rate in rates
    ):
        raise ProtocolError(
            f"Ready with {ready.blocks} blocks and rates {rates}: all must be above zero, "
            f"and blocks at most {BLOCKS_MAX}"
        )
    return WorkerReady(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        epoch=place.epoch,
        blocks=ready.blocks,
        prefill_tokens_per_s=ready.prefill_tokens_per_s,
        decode_step_s=ready.decode_step_s,
    )


def _decode_result(result: worker_pb2.StepResult, worker: WorkerInfo, place: Place) -> StepDone:
    if place.rank != 0:
        raise ProtocolError(f"rank {place.rank} sent tokens; only rank 0 may")
    return StepDone(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        group_id=place.group_id,
        epoch=place.epoch,
        step_id=result.step_id,
        results=_decode_rows(result),
        device_s=result.times.device_ns / 1e9,
        prompt_scores=_decode_prompt_scores(result),
    )


def _decode_rows(result: worker_pb2.StepResult) -> tuple[RowResult, ...]:
    """Rows of a result, its flat columns cut by `token_count`. Raises ProtocolError."""
    counts = result.token_count
    _check_column("token_ids", result.token_ids, sum(counts), may_be_empty=False)
    _check_column("logprobs", result.logprobs, sum(counts))
    _check_column("status", result.status, len(counts))
    _check_column("logits", result.logits, len(counts))
    token_ids, logprobs = tuple(result.token_ids), tuple(result.logprobs)
    _check_column("top_count", result.top_count, sum(counts))
    tops = _decode_tops("top", result.top_count, result.top_ids, result.top_logprobs)
    if not (logprobs or tops or result.status or result.logits):
        # Nothing but tokens, as in most steps.
        ends = accumulate(counts)
        return tuple(
            RowResult(token_ids[end - n : end]) for n, end in zip(counts, ends, strict=True)
        )
    rows = []
    start = 0
    for index, count in enumerate(counts):
        end = start + count
        # A row that did not ask for log-probabilities holds NaN while others in the step have them.
        asked = bool(logprobs) and not any(math.isnan(value) for value in logprobs[start:end])
        status = result.status[index] if result.status else worker_pb2.ROW_STATUS_OK
        rows.append(
            RowResult(
                token_ids=token_ids[start:end],
                logprobs=logprobs[start:end] if asked else (),
                tops=tuple(top for top in tops[start:end] if top.token_ids),
                finite=status == worker_pb2.ROW_STATUS_OK,
                logits=(result.logits[index] or None) if result.logits else None,
            )
        )
        start = end
    return tuple(rows)


def _decode_prompt_scores(result: worker_pb2.StepResult) -> tuple[PromptScores, ...]:
    """Scores of each row that scores its prompt. Raises ProtocolError."""
    counts = result.prompt_logprob_count
    logprobs = tuple(result.prompt_logprobs)
    _check_column("prompt_logprobs", logprobs, sum(counts), may_be_empty=False)
    _check_column("prompt_top_count", result.prompt_top_count, len(counts))
    top_counts = [
        top_count
        for count, top_count in zip(counts, result.prompt_top_count, strict=False)
        for _ in range(count)
    ]
    ids, values = result.prompt_top_ids, result.prompt_top_logprobs
    tops = _decode_tops("prompt_top", top_counts, ids, values)
    rows = []
    start = 0
    for count in counts:
        end = start + count
        listed = tuple(top for top in tops[start:end] if top.token_ids)
        rows.append(PromptScores(logprobs[start:end], listed))
        start = end
    return tuple(rows)


def _decode_tops(
    name: str, counts: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]
) -> list[TopTokens]:
    """Lists of likeliest tokens, cut by `counts`. Raises ProtocolError."""
    _check_column(f"{name}_ids", ids, sum(counts), may_be_empty=False)
    _check_column(f"{name}_logprobs", logprobs, sum(counts), may_be_empty=False)
    tops = []
    start = 0
    for count in counts:
        end = start + count
        tops.append(TopTokens(tuple(ids[start:end]), tuple(logprobs[start:end])))
        start = end
    return tops


def _check_column(
    name: str, column: Sequence[object], expected_count: int, may_be_empty: bool = True
) -> None:
    if len(column) != expected_count and (column or not may_be_empty):
        raise ProtocolError(f"{name} has {len(column)} entries, {expected_count} belong there")
