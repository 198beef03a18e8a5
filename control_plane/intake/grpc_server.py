"""The gRPC server for clients: generation, administration, health and reflection on one port."""

import asyncio
from collections.abc import Callable

import anyio
import grpc
from anyio.abc import TaskGroup
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from typing_extensions import override

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError, RequestCancelled, RequestError
from control_plane.intake import wire
from control_plane.intake.admin_server import AdminServer
from control_plane.intake.admitted import Admitted
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.api_keys import ApiKeys
from control_plane.intake.byte_budget import ReadBudget
from control_plane.intake.generation import Generation
from control_plane.intake.grpc_errors import abort
from control_plane.intake.key_guard import KeyGuard
from control_plane.intake.message_budget import MessageBudget
from control_plane.intake.model_card import ModelCard
from control_plane.intake.release import VERSION
from control_plane.intake.whole_service import WholeService
from control_plane.message_guard import MessageGuard
from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

GenerateContext = grpc.aio.ServicerContext[
    inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
]
CancelContext = grpc.aio.ServicerContext[inference_pb2.CancelRequest, inference_pb2.CancelResponse]
InfoContext = grpc.aio.ServicerContext[
    inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse
]


class InferenceServer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers clients. A call that ends early, however it does, cancels its request."""

    def __init__(
        self,
        config: ControlPlaneConfig,
        card: ModelCard,
        book: AnswerBook,
        service: WholeService,
        clock: Callable[[], float],
    ) -> None:
        self._card = card
        self._book = book
        self._service = service
        self._clock = clock
        self._stall_s = config.stream_buffer_stall_s
        self._message_bytes_max = config.client_message_bytes_max

    # Writing through the context, unlike yielding, shows when a client does not read.
    @override
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        try:
            with self._book.open(request.request_id, wire.PROTOCOL) as generation:
                deadline = self._deadline(context)
                wanted = wire.generation_input(request, deadline, self._card.context_tokens)
                starting = generation.start(wanted)
                del request, wanted  # they may be large, and the answer may take minutes
                await starting
                await self._answer(generation, context)
        except RequestError as error:
            await abort(context, error)

    async def _answer(self, generation: Generation, context: GenerateContext) -> None:
        first_of: Admitted | None = generation.admitted
        while (piece := await generation.next_piece()) is not None:
            for message in wire.generate_responses(piece, first_of, self._message_bytes_max):
                await self._write(context, message)
            first_of = None

    async def _write(
        self, context: GenerateContext, message: inference_pb2.GenerateResponse
    ) -> None:
        try:
            with anyio.fail_after(self._stall_s):
                await context.write(message)
        except TimeoutError as error:
            raise RequestCancelled(
                f"the client did not read the answer for {self._stall_s:g} s"
            ) from error
        except grpc.aio.BaseError as error:  # else gRPC calls it a failure of ours
            raise RequestCancelled("the client left while its answer was written") from error

    def _deadline(self, context: GenerateContext) -> float | None:
        # None for a call without one, though its type says otherwise.
        remaining_s: object = context.time_remaining()
        return self._clock() + remaining_s if isinstance(remaining_s, float) else None

    @override
    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: CancelContext
    ) -> inference_pb2.CancelResponse:
        request_id, reason = request.request_id, "cancelled by a Cancel call"
        found = self._book.cancel(request_id, reason)
        try:
            found = found or await self._service.cancel_elsewhere(request_id, reason)
        except RequestError as error:
            await abort(context, error)
        return inference_pb2.CancelResponse(found=found)

    @override
    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: InfoContext
    ) -> inference_pb2.GetModelInfoResponse:
        return wire.model_info(self._card, VERSION)


class GrpcServer:
    """The listening server. Health of "" and of the inference service follows the answer book.

    budget: where requests count as long as they are in memory.
    """

    def __init__(
        self,
        config: ControlPlaneConfig,
        book: AnswerBook,
        inference: InferenceServer,
        admin: AdminServer,
        keys: ApiKeys,
        budget: ReadBudget,
    ) -> None:
        self._config = config
        self._book = book
        self._inference = inference
        self._admin = admin
        self._interceptors = (
            KeyGuard(keys, (INFERENCE_SERVICE, ADMIN_SERVICE)),
            MessageBudget(budget),
            MessageGuard(),
        )
        self._health = health.aio.HealthServicer()
        self._health_changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, tasks: TaskGroup) -> int:
        """Listens; returns the port. Raises ConfigurationError if the address cannot be had."""
        server = grpc.aio.server(
            interceptors=self._interceptors, options=_server_options(self._config)
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            port = server.add_insecure_port(f"{host}:{self._config.grpc_port}")
        except RuntimeError as error:
            raise ConfigurationError(
                f"grpc port {self._config.grpc_port} on {self._config.host} cannot be opened; "
                "choose another with --grpc-port, or 0 for any free one"
            ) from error
        await self._set_health()
        await server.start()
        self._server = server
        tasks.start_soon(self._follow_health)
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once; running ones have `grace_s` to end."""
        server, self._server = self._server, None
        self._health_changed.set()
        if server is not None:
            await server.stop(grace_s)

    def health_changed(self) -> None:
        """The answer book's serving groups or refusal changed."""
        self._health_changed.set()

    async def _follow_health(self) -> None:
        """The health servicer can only be told by a coroutine; this one does nothing else."""
        while self._server is not None:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._set_health()

    async def _set_health(self) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if self._book.serving_group_ids else states.NOT_SERVING
        for service in ("", INFERENCE_SERVICE):
            await self._health.set(service, state)


def _server_options(config: ControlPlaneConfig) -> list[tuple[str, int]]:
    message_bytes_max = config.client_message_bytes_max
    # One that could never be held is too large, whatever the limit of one says.
    received_bytes_max = min(message_bytes_max, config.intake_bytes_max)
    return [
        ("grpc.max_receive_message_length", received_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        # A second service on the same port must fail, not take half of the calls; frontends of
        # one service share the port their control plane holds for them.
        ("grpc.so_reuseport", int(config.frontends > 0)),
    ]
