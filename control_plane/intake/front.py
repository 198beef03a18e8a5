"""The whole intake behind one object: the service feeds it effects and wires it to the core.

clients --> HttpServer, InferenceServer, AdminServer --> AnswerBook --> Admission, post --> core
                                                         AnswerBook <--deliver-- core
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

import anyio
from anyio.abc import TaskGroup

from control_plane.config import ControlPlaneConfig
from control_plane.errors import RequestError
from control_plane.intake.admin_server import AdminServer
from control_plane.intake.admission import Admission
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.api_keys import ApiKeys
from control_plane.intake.byte_budget import ByteBudget, ReadBudget
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.generation import IntakeParts
from control_plane.intake.grpc_server import GrpcServer, InferenceServer
from control_plane.intake.http_app import HttpApp
from control_plane.intake.http_server import HttpServer
from control_plane.intake.model_card import ModelCard
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.tokenizer_pool import TokenizerPool
from control_plane.intake.verdict_hub import VerdictHub
from control_plane.intake.whole_service import WholeService
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import Condemn, Effect, Event, ServingChanged

STOPPED = "the service stopped before the answer was complete"
"""What is said to whoever still waits."""
RESPONSES_GRACE_S = 2.0
"""How long `stop` lets responses that are already complete leave the process."""


@dataclass(frozen=True, slots=True)
class IntakePorts:
    """Where the two client servers listen."""

    http_port: int
    grpc_port: int


class Intake:
    """Client-facing half of the control plane. All methods are for the event loop's thread.

    post: takes an event to the core; it may call `deliver` before it returns. service: what it is
    part of. clock: the monotonic clock of the core, for deadlines. metrics: counts every call.
    Construction builds the tokenizer (0.3 s for 50 k tokens) and raises ConfigurationError if the
    model's files do not allow it.
    """

    def __init__(
        self,
        config: ControlPlaneConfig,
        model: ModelFiles,
        post: Callable[[Event], None],
        service: WholeService,
        clock: Callable[[], float],
        *,
        metrics: Metrics,
    ) -> None:
        tokenizer = Tokenizer(model.tokenizer, str(model.path))
        context_tokens = config.scheduling.context_tokens
        self._card = card = ModelCard.of(model, config.model_name, context_tokens, tokenizer.size)
        self._pool = TokenizerPool(
            tokenizer,
            ChatTemplate(model.chat_template, model.special_tokens, local_now),
            config.tokenizer_threads,
            budget=ByteBudget(
                bytes_max=config.intake_bytes_max, pieces_max=config.scheduling.queue_requests_max
            ),
            context_tokens=card.context_tokens,
        )
        admission = Admission(config, card, tokenizer, self._pool, random.SystemRandom())
        parts = IntakeParts(admission, tokenizer, post, metrics, clock)
        self._book = book = AnswerBook(parts, service.call_opened, service.call_closed)
        self._verdicts = VerdictHub()
        keys, budget = ApiKeys(config.api_keys), ReadBudget(config.intake_bytes_max)
        app = HttpApp(config, card, book, tokenizer, utc_now, service, keys, budget)
        self._http = HttpServer(config, app.asgi())
        admin = AdminServer(config, card, book, self._verdicts, service)
        inference = InferenceServer(config, card, book, service, clock)
        self._grpc = GrpcServer(config, book, inference, admin, keys, budget)

    async def start(self, tasks: TaskGroup) -> IntakePorts:
        """Opens both servers; `tasks` runs their background work until `stop`."""
        grpc_port = await self._grpc.start(tasks)
        return IntakePorts(http_port=await self._http.start(tasks), grpc_port=grpc_port)

    async def stop(self, reason: str = STOPPED) -> None:
        """Ends every answer still running with UNAVAILABLE, then closes the servers."""
        self.refuse_new("the service is stopping")
        self._book.fail_all(reason)
        self._verdicts.close()
        # At once: neither port may take calls while what is open at the other ends.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._http.stop, RESPONSES_GRACE_S)
            tasks.start_soon(self._grpc.stop, RESPONSES_GRACE_S)
        self._pool.close()

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core; those that are not for intake are ignored."""
        self._book.deliver(effect)
        if isinstance(effect, ServingChanged):
            self._grpc.health_changed()

    def publish_verdict(self, condemn: Condemn) -> None:
        """Tells every launcher that watches, now or later, that this process must be killed."""
        self._verdicts.publish(condemn)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Somebody asked, at another intake, to end this call; False if it is over."""
        return self._book.cancel(request_id, reason)

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Another intake has a call of this id."""
        self._book.refuse(request_id, error)

    @property
    def vocabulary_tokens(self) -> int:
        """Ids from there on do not exist for any client, though the model may draw them."""
        return self._card.vocabulary_size

    @property
    def running_count(self) -> int:
        """Calls some client still waits for or reads."""
        return self._book.running_count

    @property
    def drained(self) -> bool:
        """Whether no call is left."""
        return self._book.running_count == 0

    def refuse_new(self, reason: str) -> None:
        """From now on new requests get UNAVAILABLE with this reason; health says not serving."""
        self._book.refuse_new(reason)
        self._grpc.health_changed()


def vocabulary_tokens(config: ControlPlaneConfig, model: ModelFiles) -> int:
    """What an intake of this model would have as its own (0.3 s for 50 k tokens).

    Raises ConfigurationError if the model's files do not allow it.
    """
    tokenizer = Tokenizer(model.tokenizer, str(model.path))
    return ModelCard.of(model, config.model_name, None, tokenizer.size).vocabulary_size


def local_now() -> datetime:
    """Local time, for templates that print the date."""
    return datetime.now(timezone.utc).astimezone()


def utc_now() -> float:
    """Seconds since 1970, for the `created` field of HTTP answers."""
    return datetime.now(timezone.utc).timestamp()
