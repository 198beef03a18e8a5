"""Between the client protocol's messages and intake's records, and from errors to rich statuses."""

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from control_plane.errors import RequestError
from control_plane.intake.admission import ChatPrompt, GenerationInput, TextPrompt, TokenPrompt
from control_plane.intake.answer import AnswerPiece, Usage
from control_plane.intake.model_card import ModelCard
from control_plane.request import FinishReason, Request
from control_plane.scheduling.messages import (
    BlockCounts,
    Condemn,
    GroupSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from protos import admin_pb2, inference_pb2

ERROR_DOMAIN = "polychip"

RESERVED_SAMPLING = (
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
    "top_logprobs",
    "prompt_logprobs",
)
RESERVED_REQUEST = ("priority", "cache_salt", "adapter")

FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


# ---------------------------------------------------------------- generation


def generation_input(
    message: inference_pb2.GenerateRequest, deadline: float | None
) -> GenerationInput:
    """The request as intake sees it; nothing is checked here."""
    sampling = message.sampling
    return GenerationInput(
        prompt=_prompt(message),
        request_id=message.request_id,
        model=message.model,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        resume_output_ids=tuple(message.resume_output_ids),
        deadline=deadline,
        reserved=_reserved(message),
    )


def _prompt(
    message: inference_pb2.GenerateRequest,
) -> TextPrompt | TokenPrompt | ChatPrompt | None:
    match message.WhichOneof("input"):
        case "prompt":
            return TextPrompt(message.prompt)
        case "prompt_ids":
            return TokenPrompt(tuple(message.prompt_ids.ids))
        case "chat":
            return ChatPrompt(
                tuple(
                    {"role": each.role, "content": each.content} for each in message.chat.messages
                )
            )
        case _:
            return None


def _reserved(message: inference_pb2.GenerateRequest) -> dict[str, object]:
    sampling = message.sampling
    values: dict[str, object] = {
        name: getattr(sampling, name) for name in RESERVED_SAMPLING if sampling.HasField(name)
    }
    values |= {name: getattr(message, name) for name in RESERVED_REQUEST if message.HasField(name)}
    values["logit_bias"] = dict(sampling.logit_bias)
    values["stop"] = list(sampling.stop)
    return values


def generate_response(
    piece: AnswerPiece, first_of: Request | None
) -> inference_pb2.GenerateResponse:
    """A piece as a message; first_of: the request, for the first message of its answer."""
    message = inference_pb2.GenerateResponse(
        first_index=piece.first_index,
        token_ids=piece.token_ids,
        text=piece.text,
        logprobs=piece.logprobs,
        finish_reason=FINISH_REASONS[piece.finish_reason],
        usage=None if piece.usage is None else _usage(piece.usage),
    )
    if first_of is not None:
        message.request_id = first_of.request_id
        message.prompt_ids.extend(first_of.prompt_ids)
    return message


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        group=usage.group_id,
        failovers=usage.failovers,
        retractions=usage.retractions,
        seed=usage.seed,
    )


def model_info(card: ModelCard, version: str) -> inference_pb2.GetModelInfoResponse:
    """The card as a message."""
    return inference_pb2.GetModelInfoResponse(
        names=card.names,
        architecture=card.architecture,
        context_tokens=card.context_tokens,
        vocabulary_size=card.vocabulary_size,
        end_token_ids=card.end_token_ids,
        has_chat_template=card.has_chat_template,
        version=version,
    )


# ---------------------------------------------------------------- administration


def status_response(
    snapshot: Snapshot, *, intake_count: int, term: int, version: str
) -> admin_pb2.GetStatusResponse:
    """The core's snapshot and intake's table size as a message."""
    return admin_pb2.GetStatusResponse(
        workers=[_worker(worker) for worker in snapshot.workers],
        groups=[_group(group) for group in snapshot.groups],
        requests=admin_pb2.RequestTables(
            intake=intake_count,
            scheduling=snapshot.requests,
            waiting=snapshot.waiting,
            running=snapshot.running,
            steps_in_flight=sum(group.steps_in_flight for group in snapshot.groups),
        ),
        generated_tokens=snapshot.generated_tokens,
        term=term,
        version=version,
        failovers=snapshot.failovers,
    )


def _worker(worker: WorkerSnapshot) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        id=worker.worker_id,
        pid=worker.pid,
        incarnation=worker.incarnation,
        state=worker.state,
        device=worker.device,
        group=worker.group_id,
        backend=worker.backend,
        heartbeat_age_s=worker.heartbeat_age_s,
    )


def _group(group: GroupSnapshot) -> admin_pb2.GroupStatus:
    return admin_pb2.GroupStatus(
        id=group.group_id,
        epoch=group.epoch,
        ranks=group.worker_ids,
        state=group.state,
        running=group.running,
        waiting=group.waiting,
        retracted=group.retracted,
        blocks=_blocks(group.blocks),
        block_tokens=group.block_tokens,
        steps=group.steps,
    )


def _blocks(blocks: BlockCounts) -> admin_pb2.BlockCounts:
    return admin_pb2.BlockCounts(
        free=blocks.free, cached=blocks.cached, referenced=blocks.referenced, total=blocks.total
    )


def verdict(condemn: Condemn) -> admin_pb2.Verdict:
    """A condemned process as a message."""
    return admin_pb2.Verdict(
        worker_id=condemn.worker_id,
        incarnation=condemn.incarnation,
        pid=condemn.pid,
        reason=condemn.reason,
    )


# ---------------------------------------------------------------- errors


def rich_status(error: RequestError) -> Status:
    """The error with google.rpc details: its reason, the field at fault, when to try again."""
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if error.field is not None:
        violation = BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(RetryInfo(retry_delay=delay))
    status = Status(code=Code.Value(error.grpc_status), message=error.message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status
