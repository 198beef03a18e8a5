"""AdminService: what operators, the launcher and tests ask of a running service."""

from struct import iter_unpack

import grpc
from typing_extensions import override

from control_plane.config import ControlPlaneConfig
from control_plane.errors import InvalidRequest, RequestError, WorkerFailure
from control_plane.intake import admin_wire, wire
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.answer_piece import Usage
from control_plane.intake.generation_input import GenerationInput, TokenPrompt
from control_plane.intake.grpc_errors import abort
from control_plane.intake.model_card import ModelCard
from control_plane.intake.shown import shown
from control_plane.intake.verdict_hub import VerdictHub
from control_plane.intake.whole_service import WholeService
from protos import admin_pb2, admin_pb2_grpc

StatusContext = grpc.aio.ServicerContext[admin_pb2.GetStatusRequest, admin_pb2.GetStatusResponse]
FlushContext = grpc.aio.ServicerContext[admin_pb2.FlushCacheRequest, admin_pb2.FlushCacheResponse]
LogitsContext = grpc.aio.ServicerContext[
    admin_pb2.DebugLogitsRequest, admin_pb2.DebugLogitsResponse
]
VerdictsContext = grpc.aio.ServicerContext[admin_pb2.WatchVerdictsRequest, admin_pb2.Verdict]


class AdminServer(admin_pb2_grpc.AdminServiceServicer):
    """service: what this intake is part of."""

    def __init__(
        self,
        config: ControlPlaneConfig,
        card: ModelCard,
        book: AnswerBook,
        verdicts: VerdictHub,
        service: WholeService,
    ) -> None:
        self._debug_api = config.debug_api
        self._card = card
        self._book = book
        self._verdicts = verdicts
        self._service = service

    @override
    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: StatusContext
    ) -> admin_pb2.GetStatusResponse:
        try:
            return await self._service.status(self._book.running_count)
        except RequestError as error:
            await abort(context, error)

    @override
    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: FlushContext
    ) -> admin_pb2.FlushCacheResponse:
        try:
            return admin_pb2.FlushCacheResponse(blocks_freed=await self._book.flush_cache())
        except RequestError as error:
            await abort(context, error)

    @override
    async def DebugLogits(
        self, request: admin_pb2.DebugLogitsRequest, context: LogitsContext
    ) -> admin_pb2.DebugLogitsResponse:
        if not self._debug_api:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "DebugLogits is off; start the control plane with --debug-api",
            )
        try:
            return await self._logits(request)
        except RequestError as error:
            await abort(context, error)

    async def _logits(self, request: admin_pb2.DebugLogitsRequest) -> admin_pb2.DebugLogitsResponse:
        status = await self._service.status(self._book.running_count)
        group_ids = [group.id for group in status.groups]
        if request.group and request.group not in group_ids:
            raise InvalidRequest(
                f"group: {shown(request.group)} does not exist; send one of "
                f"{', '.join(group_ids) or '(none yet)'} or leave it out",
                field="group",
            )
        # Before millions of objects are made of them.
        wire.check_prompt_length(len(request.token_ids), self._card.context_tokens)
        wanted = GenerationInput(
            prompts=(TokenPrompt(tuple(request.token_ids)),),
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            wants_logits=True,
            target_group=request.group or None,
        )
        usage: Usage | None = None
        with self._book.open("", wire.PROTOCOL) as generation:
            await generation.start(wanted)
            while (piece := await generation.next_piece()) is not None:
                usage = piece.usage
        if generation.logits is None or usage is None:
            raise WorkerFailure("the worker returned no logits")
        return admin_pb2.DebugLogitsResponse(
            logits=(value for (value,) in iter_unpack("<f", generation.logits)),
            group=usage.group_id,
        )

    # A watcher hears nothing for hours; yielding leaves the end of the call to gRPC.
    @override
    async def WatchVerdicts(  # type: ignore[override]
        self, request: admin_pb2.WatchVerdictsRequest, context: VerdictsContext
    ) -> None:
        with self._verdicts.watching() as verdicts:
            async for condemn in verdicts:
                await context.write(admin_wire.verdict(condemn))
