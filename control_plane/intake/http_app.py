"""The HTTP endpoints as an ASGI application: OpenAI's, health, metrics and administration."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from control_plane.config import ControlPlaneConfig
from control_plane.errors import RequestError
from control_plane.intake.admitted import Admitted
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.api_keys import ApiKeys
from control_plane.intake.byte_budget import ReadBudget
from control_plane.intake.http_access import with_api_keys, with_request_id
from control_plane.intake.http_answer import HttpAnswer
from control_plane.intake.http_body import BodyReader, BodyStalled, BodyTooLarge, HeldBody, parting
from control_plane.intake.http_chat import ChatFormat
from control_plane.intake.http_completion import CompletionFormat
from control_plane.intake.http_errors import error_response, json_response, plain_error_response
from control_plane.intake.http_format import AnswerFormat
from control_plane.intake.http_schema import HttpCall, read_chat, read_completion
from control_plane.intake.model_card import ModelCard
from control_plane.intake.release import VERSION
from control_plane.intake.shown import shortened
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.whole_service import WholeService

CLIENT_GONE_STATUS = 499
"""Never reaches the client, who left while sending."""


class HttpApp:
    """wall_clock: seconds since 1970, for the `created` fields.

    service: what this intake is part of.
    """

    def __init__(
        self,
        config: ControlPlaneConfig,
        card: ModelCard,
        book: AnswerBook,
        tokenizer: Tokenizer,
        wall_clock: Callable[[], float],
        service: WholeService,
        keys: ApiKeys,
        budget: ReadBudget,
    ) -> None:
        self._values_max = config.json_values_max
        self._stall_s = config.stream_buffer_stall_s
        self._bodies = BodyReader(config, budget)
        self._keys = keys
        self._card = card
        self._book = book
        self._tokenizer = tokenizer
        self._wall_clock = wall_clock
        self._service = service
        self._created = int(wall_clock())

    def asgi(self) -> ASGIApp:
        """The application to serve."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/admin/cache/flush", self._flush_cache, methods=["POST"]),
        ]
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            RequestError: self._refused,
            BodyTooLarge: self._body_too_large,
            BodyStalled: self._body_stalled,
            ClientDisconnect: self._client_gone,
            HTTPException: self._no_such_endpoint,
            Exception: self._broken,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        return with_request_id(with_api_keys(app, self._keys, self._bodies))

    # ---------------------------------------------------------------- endpoints

    async def _completions(self, request: Request) -> HttpAnswer:
        body = await self._bodies.read(request)
        return self._answer(f"cmpl-{uuid4().hex}", body, read_completion, CompletionFormat)

    async def _chat_completions(self, request: Request) -> HttpAnswer:
        body = await self._bodies.read(request)
        return self._answer(f"chatcmpl-{uuid4().hex}", body, read_chat, ChatFormat)

    async def _models(self, _request: Request) -> Response:
        models = list(map(self._model_object, self._card.names))
        return json_response({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        name: str = request.path_params["name"]
        self._card.check_name(name)
        return json_response(self._model_object(name))

    async def _health(self, _request: Request) -> Response:
        groups = self._book.serving_group_ids
        state = "serving" if groups else "draining" if self._book.refusal else "not serving"
        content = {"status": state, "groups": groups, "version": VERSION}
        return json_response(content, 200 if groups else 503)

    async def _metrics(self, _request: Request) -> Response:
        content, content_type = await self._service.metrics_text()
        return Response(content, headers={"content-type": content_type})

    async def _flush_cache(self, _request: Request) -> Response:
        return json_response({"blocks_freed": await self._book.flush_cache()})

    # ---------------------------------------------------------------- parts

    def _model_object(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "polychip",
            "max_model_len": self._card.context_tokens,
        }

    def _answer(
        self,
        request_id: str,
        body: HeldBody,
        read: Callable[[bytes, int], HttpCall],
        kind: type[AnswerFormat],
    ) -> HttpAnswer:
        created = int(self._wall_clock())

        def make_format(admitted: Admitted, call: HttpCall) -> AnswerFormat:
            model_name = call.wanted.model or self._card.name
            return kind(admitted, call, model_name, created, self._tokenizer)

        return HttpAnswer(
            self._book,
            request_id,
            body,
            lambda raw: read(raw, self._values_max),
            make_format,
            self._stall_s,
        )

    # ---------------------------------------------------------------- errors

    async def _refused(self, request: Request, error: RequestError) -> Response:
        return parting(request, error_response(error))

    async def _body_too_large(self, request: Request, error: BodyTooLarge) -> Response:
        message = f"body: more than {error.bytes_max} bytes; send a shorter prompt"
        return parting(request, plain_error_response(413, message, "BODY_TOO_LARGE", "body"))

    async def _body_stalled(self, request: Request, error: BodyStalled) -> Response:
        message = f"body: {error}; send the request again"
        return parting(request, plain_error_response(408, message, "BODY_STALLED", "body"))

    async def _client_gone(self, _request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    async def _no_such_endpoint(self, request: Request, error: HTTPException) -> Response:
        path = shortened(request.url.path)
        message = f"{request.method} {path}: {error.detail}"
        code = "METHOD_NOT_ALLOWED" if error.status_code == 405 else "NOT_FOUND"
        response = plain_error_response(error.status_code, message, code)
        response.headers.update(error.headers or {})
        return response

    async def _broken(self, _request: Request, _error: Exception) -> Response:
        """A mistake of ours; the log has the rest."""
        return plain_error_response(500, "the server failed; its log says why", "INTERNAL")
