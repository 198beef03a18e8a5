"""The core and the rest of the service as an intake in a process of its own sees them.

Intake --events, questions--> RemoteCore --FromFrontend--> control plane
Intake <--effects, answers--- RemoteCore <--ToFrontend---- control plane
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import anyio
from typing_extensions import override

from control_plane.errors import QueueFull, RequestError, ServiceUnavailable
from control_plane.frontends import wire
from control_plane.frontends.frame_link import FrameLink
from control_plane.frontends.wire import Choice
from control_plane.intake.whole_service import WholeService
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    Condemn,
    Effect,
    End,
    Event,
    Failed,
    FlushCache,
    ServingChanged,
    Submit,
)
from protos import admin_pb2, frontend_pb2

REQUESTS_BACKLOG_BYTES_MAX = 1 << 26
"""Of what is on its way to the core; beyond it new requests are refused."""
RETRY_AFTER_S = 1.0
ANSWER_S = 10.0
"""The control plane answers within this, or is in trouble."""
REPORT_S = 1.0
"""Other frontends tell what they counted within this, or a scrape shows what they told before."""
REPORT_INTERVAL_S = 1.0
"""Between two reports of what was counted, while there is something to count: what is not yet told
is lost with the process."""
NOBODY = "the control plane does not answer; try again later"


class Front(Protocol):
    """What the control plane says to an intake."""

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core."""

    def publish_verdict(self, condemn: Condemn) -> None:
        """Tells every launcher that watches here."""

    def cancel(self, request_id: str, reason: str) -> bool:
        """Ends a call; False if it is over."""

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Ends a call whose id another intake has."""

    def refuse_new(self, reason: str) -> None:
        """From now on new calls are refused."""


class RemoteCore(WholeService):
    """For the event loop's thread. counts: what was counted of requests, as Prometheus reads it.

    front: set before the first message is taken.
    """

    front: Front

    def __init__(self, link: FrameLink, counts: Callable[[], bytes]) -> None:
        self._link = link
        self._counts = counts
        self._calls: dict[str, int] = {}
        """Those open here, and the number of each: an id may be used again."""
        self._choices: dict[int, Choice] = {}
        """Of those the core computes, by their numbers."""
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self._answers: dict[int, asyncio.Future[frontend_pb2.Answer]] = {}
        self._last_query_id = 0
        self._report_due: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- intake's side

    def post(self, event: Event) -> None:
        """Takes an event of intake to the core; its effects come later."""
        match event:
            case Submit():
                self._submit(event)
            case End(request_id=request_id) | Cancel(request_id=request_id):
                self._forget(request_id)
                self._send(wire.event_message(event))
            case FlushCache():
                self._send(wire.event_message(event))
            case _:
                raise AssertionError(event)

    @override
    def call_opened(self, request_id: str) -> None:
        number = self._calls[request_id] = self._next_number()
        self._send(wire.opened_message(request_id, number))

    @override
    def call_closed(self, request_id: str) -> None:
        del self._calls[request_id]
        closed = frontend_pb2.CallClosed(request_id=request_id)
        self._send(frontend_pb2.FromFrontend(call_closed=closed))
        self._report_soon()

    @override
    async def status(self, intake_count: int) -> admin_pb2.GetStatusResponse:
        answer = await self._ask(frontend_pb2.Query(status=frontend_pb2.StatusQuery()))
        return admin_pb2.GetStatusResponse.FromString(answer.content)

    @override
    async def metrics_text(self) -> tuple[bytes, str]:
        self.report()
        fresh = frontend_pb2.Query(metrics=frontend_pb2.MetricsQuery(fresh=True))
        try:
            answer = await self._ask(fresh, REPORT_S)
        except ServiceUnavailable:
            answer = await self._ask(frontend_pb2.Query(metrics=frontend_pb2.MetricsQuery()))
        return answer.content, answer.content_type

    @override
    async def cancel_elsewhere(self, request_id: str, reason: str) -> bool:
        cancel = frontend_pb2.CancelCall(request_id=request_id, reason=reason)
        answer = await self._ask(frontend_pb2.Query(cancel_call=cancel))
        return answer.found

    # ---------------------------------------------------------------- the control plane's side

    def take(self, message: frontend_pb2.ToFrontend) -> None:
        """Takes a message, but for Start and Stop, which are the process's."""
        match message.WhichOneof("kind"):
            case "tokens":
                self.front.deliver(wire.tokens_of(message.tokens, self._choices))
                self._report_soon()
            case "accepted":
                if (choice := self._choices.get(message.accepted.number)) is not None:
                    self.front.deliver(Accepted(choice.request_id, message.accepted.tokens_max))
            case "failed":
                if (choice := self._choices.get(message.failed.number)) is not None:
                    self._forget(choice.request_id)
                    error = wire.error_of(message.failed.failure)
                    self.front.deliver(Failed(choice.request_id, error))
            case "cache_flushed":
                self.front.deliver(CacheFlushed(message.cache_flushed.blocks_freed))
            case "serving_changed":
                self.front.deliver(ServingChanged(tuple(message.serving_changed.group_ids)))
            case "call_refused":
                refused = message.call_refused
                if self._calls.get(refused.request_id) == refused.number:
                    self.front.refuse(refused.request_id, wire.error_of(refused.failure))
            case "cancel_call":
                self._cancel(message.cancel_call)
            case "refuse_new":
                self.front.refuse_new(message.refuse_new.reason)
                self._send(frontend_pb2.FromFrontend(refuses_new=frontend_pb2.RefusesNew()))
            case "condemned":
                self.front.publish_verdict(wire.condemn_of(message.condemned))
            case "ping":
                self._send(frontend_pb2.FromFrontend(pong=frontend_pb2.Pong()))
            case "report_metrics":
                self.report()
            case "answer":
                answered = self._answers.get(message.answer.query_id)
                if answered is not None and not answered.done():
                    answered.set_result(message.answer)
            case kind:
                raise AssertionError(kind)

    def listening(self) -> None:
        """Tells that clients are taken."""
        self._send(frontend_pb2.FromFrontend(listening=frontend_pb2.Listening()))

    def start_refused(self, message: str) -> None:
        """Tells why this process cannot serve."""
        refused = frontend_pb2.StartRefused(message=wire.printable(message))
        self._send(frontend_pb2.FromFrontend(start_refused=refused))

    def report(self) -> None:
        """Tells what was counted."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        counted = frontend_pb2.RequestMetrics(text=self._counts())
        self._send(frontend_pb2.FromFrontend(metrics=counted))

    def close(self) -> None:
        """The control plane is gone, or this process is about to be: no question is answered."""
        for answered in self._answers.values():
            if not answered.done():
                answered.set_exception(ServiceUnavailable(NOBODY, retry_after_s=RETRY_AFTER_S))

    # ---------------------------------------------------------------- inside

    def _send(self, message: frontend_pb2.FromFrontend) -> None:
        self._link.send(message.SerializeToString())

    def _submit(self, submit: Submit) -> None:
        request = submit.request
        if self._link.backlog_bytes > REQUESTS_BACKLOG_BYTES_MAX:
            error = QueueFull(
                "the scheduler does not keep up with the requests; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
            self.front.deliver(Failed(request.request_id, error))
            return
        number = self._next_number()
        self._choices[number] = Choice(number, request.request_id)
        self._numbers[request.request_id] = number
        # Choices of one call have its id and their index; see control_plane/intake/admission.py.
        request_id = request.request_id
        call_id = request_id if request_id in self._calls else request_id.rpartition("/")[0]
        self._send(wire.submit_message(request, number, call_id))

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _cancel(self, cancel: frontend_pb2.CancelCall) -> None:
        found = self.front.cancel(cancel.request_id, cancel.reason)
        cancelled = frontend_pb2.CallCancelled(cancel_id=cancel.cancel_id, found=found)
        self._send(frontend_pb2.FromFrontend(call_cancelled=cancelled))

    def _forget(self, request_id: str) -> None:
        number = self._numbers.pop(request_id, None)
        if number is not None:
            del self._choices[number]

    async def _ask(
        self, query: frontend_pb2.Query, patience_s: float | None = None
    ) -> frontend_pb2.Answer:
        self._last_query_id += 1
        query.query_id = self._last_query_id
        answered = asyncio.get_running_loop().create_future()
        self._answers[query.query_id] = answered
        try:
            self._send(frontend_pb2.FromFrontend(query=query))
            with anyio.fail_after(patience_s or ANSWER_S):
                answer: frontend_pb2.Answer = await answered
                return answer
        except TimeoutError as error:
            raise ServiceUnavailable(NOBODY, retry_after_s=RETRY_AFTER_S) from error
        finally:
            del self._answers[query.query_id]

    def _report_soon(self) -> None:
        if self._report_due is None:
            loop = asyncio.get_running_loop()
            self._report_due = loop.call_later(REPORT_INTERVAL_S, self.report)
