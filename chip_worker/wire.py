"""Conversion between a worker's plain records and the messages of protos/worker.proto.

    AttachResponse  --decode_command-->  Command      Report  --encode_report-->  AttachRequest

Decoders check shape; whether a message is of the right term and epoch, the inbox checks.
"""

from dataclasses import dataclass

from chip_worker.batch import (
    Command,
    Fault,
    FaultKind,
    FormGroup,
    Ready,
    Rendezvous,
    Report,
    ResetEpoch,
    Shutdown,
    StepAck,
    StepResult,
)
from chip_worker.result_wire import encode_result, encode_times
from chip_worker.step_wire import MalformedMessage, decode_step
from protos import worker_pb2

PROTOCOL_VERSION = 1

_FAULT_KINDS = {
    FaultKind.DEVICE: worker_pb2.FAULT_KIND_DEVICE,
    FaultKind.OUT_OF_MEMORY: worker_pb2.FAULT_KIND_OUT_OF_MEMORY,
    FaultKind.PEER: worker_pb2.FAULT_KIND_PEER,
    FaultKind.DIVERGED: worker_pb2.FAULT_KIND_DIVERGED,
    FaultKind.MODEL: worker_pb2.FAULT_KIND_MODEL,
    FaultKind.INTERNAL: worker_pb2.FAULT_KIND_INTERNAL,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker process says of itself in Hello; fixed for the life of the process.

    kv_windows: of every KV group of the model the tokens its layers see, 0 for all.
    unavailable_reason: why it has no chip; what describes chip and model may then be empty.
    """

    worker_id: str
    incarnation: int
    pid: int
    backend: str
    chip_index: int
    chip_description: str
    memory_bytes: int
    dtype: str
    batch_invariant: bool
    block_tokens_multiple: int
    model_name: str
    architecture: str
    model_digest: str
    context_tokens: int
    vocabulary_size: int
    kv_windows: tuple[int, ...] = (0,)
    rows_max: int = 0
    device_id: str = ""
    unavailable_reason: str | None = None


# ---------------------------------------------------------------- to the control plane


def encode_hello(
    identity: Identity, term_highest: int, join_token: str | None
) -> worker_pb2.AttachRequest:
    """Introduces the process."""
    return worker_pb2.AttachRequest(
        hello=worker_pb2.Hello(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            protocol_version=PROTOCOL_VERSION,
            chip=worker_pb2.ChipInfo(
                backend=identity.backend,
                index=identity.chip_index,
                description=identity.chip_description,
                memory_bytes=identity.memory_bytes,
                dtype=identity.dtype,
                batch_invariant=identity.batch_invariant,
                block_tokens_multiple=identity.block_tokens_multiple,
                rows_max=identity.rows_max,
                device_id=identity.device_id,
            ),
            model=worker_pb2.ModelFingerprint(
                name=identity.model_name,
                architecture=identity.architecture,
                digest=identity.model_digest,
                context_tokens=identity.context_tokens,
                vocabulary_size=identity.vocabulary_size,
                kv_window=identity.kv_windows,
            ),
            term_highest=term_highest,
            pid=identity.pid,
            join_token=join_token,
            unavailable_reason=identity.unavailable_reason,
        )
    )


def encode_goodbye(reason: str) -> worker_pb2.AttachRequest:
    """The process leaves on purpose."""
    return worker_pb2.AttachRequest(goodbye=worker_pb2.Goodbye(reason=reason))


def encode_report(report: Report) -> worker_pb2.AttachRequest:
    """A report of the session, as the message that carries it."""
    match report:
        case StepResult():
            return worker_pb2.AttachRequest(result=encode_result(report))
        case StepAck():
            ack = worker_pb2.StepAck(
                term=report.term,
                group_epoch=report.epoch,
                times=[encode_times(times) for times in report.times],
            )
            return worker_pb2.AttachRequest(ack=ack)
        case Rendezvous():
            rendezvous = worker_pb2.Rendezvous(
                term=report.term, group_epoch=report.epoch, address=report.address
            )
            return worker_pb2.AttachRequest(rendezvous=rendezvous)
        case Ready():
            return worker_pb2.AttachRequest(ready=_encode_ready(report))
        case Fault():
            fault = worker_pb2.Fault(
                term=report.term,
                group_epoch=report.epoch,
                step_id=report.step_id,
                kind=_FAULT_KINDS[report.kind],
                message=report.message,
                exiting=report.exiting,
            )
            return worker_pb2.AttachRequest(fault=fault)


def _encode_ready(ready: Ready) -> worker_pb2.Ready:
    return worker_pb2.Ready(
        term=ready.term,
        group_epoch=ready.epoch,
        blocks=ready.blocks,
        prefill_tokens_per_s=ready.prefill_tokens_per_s,
        decode_step_s=ready.decode_step_s,
        step_credit=ready.step_credit,
        weight_bytes=ready.weight_bytes,
    )


# ---------------------------------------------------------------- from the control plane


def decode_command(
    message: worker_pb2.AttachResponse, received_ns: int, kv_groups_count: int = 1
) -> Command:
    """The command a message means; received_ns is its arrival on a monotonic clock.

    kv_groups_count: of the model. Raises MalformedMessage.
    """
    match message.WhichOneof("kind"):
        case "step":
            return decode_step(message.step, received_ns, kv_groups_count)
        case "form":
            return _decode_form_group(message.form)
        case "rendezvous":
            rendezvous = message.rendezvous
            return Rendezvous(rendezvous.term, rendezvous.group_epoch, rendezvous.address)
        case "reset":
            return ResetEpoch(message.reset.term, message.reset.group_epoch, message.reset.reason)
        case "shutdown":
            return Shutdown(message.shutdown.reason)
        case kind:
            raise MalformedMessage(
                f"the control plane may not send {kind or 'an empty message'} here; is it a newer "
                f"version than this worker?"
            )


def _decode_form_group(form: worker_pb2.FormGroup) -> FormGroup:
    layout = form.layout
    if layout.tensor_rank >= layout.tensor_size or form.group_epoch == 0:
        raise MalformedMessage(
            f"FormGroup with rank {layout.tensor_rank} of {layout.tensor_size}, epoch "
            f"{form.group_epoch}"
        )
    if not form.blocks_wanted:
        raise MalformedMessage(
            "FormGroup without blocks_wanted; is the control plane older than this worker?"
        )
    return FormGroup(
        term=form.term,
        group_id=form.group_id,
        epoch=form.group_epoch,
        rank=layout.tensor_rank,
        world_size=layout.tensor_size,
        deadline_s=form.deadline_s,
        block_tokens=form.block_tokens,
        slots=form.slots,
        chunk_tokens=form.chunk_tokens,
        context_tokens=form.context_tokens,
        blocks_wanted=form.blocks_wanted,
        kv_policy=form.kv_policy,
        step_deadline_s=form.step_deadline_s,
        vocabulary_tokens=form.vocabulary_tokens,
        probe_deadline_s=form.probe_deadline_s,
    )
