"""Routes between the frontends and the core: whose call is which, who hears what.

frontend --FromFrontend--> FrontHub --events--> core
frontend <--ToFrontend---- FrontHub <--effects-- core
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.frontends import wire
from control_plane.frontends.request_sums import RequestSums
from control_plane.frontends.wire import Choice
from control_plane.intake.answer_book import taken
from control_plane.intake.verdict_hub import RecentVerdicts
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
    PromptDelta,
    ServingChanged,
    TokenDelta,
    Tokens,
)
from protos import frontend_pb2

FRONTEND_GONE = "its frontend is gone"


class Frontend:
    """One frontend process as the hub knows it. send: takes a message to it.

    listening: it takes clients. refusal: why it cannot. answered: it did since the latest ping.
    """

    def __init__(self, name: str, send: Callable[[bytes], None]) -> None:
        self.name = name
        self.listening = False
        self.refusal: str | None = None
        self.refuses_new = False
        self.answered = True
        self._send = send

    def send(self, message: frontend_pb2.ToFrontend) -> None:
        """Sends a message; without effect once the process is gone."""
        self._send(message.SerializeToString())

    def ping(self) -> None:
        """Asks for a sign of life."""
        self.answered = False
        self.send(frontend_pb2.ToFrontend(ping=frontend_pb2.Ping()))


class _Owned(NamedTuple):
    """A choice the core computes, and who asked for it."""

    frontend: Frontend
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Scrape:
    """A question for the metrics; awaited: who has yet to tell what it counted."""

    asker: Frontend
    query_id: int
    awaited: set[Frontend]


class _AskedCancel(NamedTuple):
    """A question to end a call, which its owner answers."""

    asker: Frontend
    query_id: int
    owner: Frontend


class FrontHub:
    """For the event loop's thread only.

    post: takes an event to the core, which may call `deliver` before it returns. status: the
    service's state as a GetStatusResponse, given the number of calls in progress. metrics_text: the
    answer to a scrape and its content type. sums: keeps what frontends count.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        status: Callable[[int], bytes],
        metrics_text: Callable[[], tuple[bytes, str]],
        sums: RequestSums,
    ) -> None:
        self._post = post
        self._status = status
        self._metrics_text = metrics_text
        self._sums = sums
        self._frontends: list[Frontend] = []
        self._calls: dict[str, Frontend] = {}
        """By the client's id."""
        self._owned: dict[str, _Owned] = {}
        """By the core's ids."""
        self._flushing: deque[Frontend] = deque()
        self._scrapes: list[_Scrape] = []
        self._cancels: dict[int, _AskedCancel] = {}
        self._last_cancel_id = 0
        self._serving = ServingChanged(())
        self._verdicts = RecentVerdicts()
        self._refusal: str | None = None

    @property
    def calls_count(self) -> int:
        """Calls some client still waits for or reads."""
        return len(self._calls)

    @property
    def listening_count(self) -> int:
        """Frontends that take clients."""
        return sum(each.listening for each in self._frontends)

    @property
    def refuses_new(self) -> bool:
        """Whether new calls are refused."""
        return self._refusal is not None

    @property
    def drained(self) -> bool:
        """Whether no call is left, and no frontend can let one in any more.

        One that does not listen yet has none, and may read nothing for seconds: it builds a
        tokenizer.
        """
        listening = (each for each in self._frontends if each.listening)
        return not self._calls and all(each.refuses_new for each in listening)

    # ---------------------------------------------------------------- the processes' side

    def attach(self, frontend: Frontend) -> None:
        """A frontend is there; its first message was Start."""
        self._frontends.append(frontend)
        frontend.send(wire.effect_message(self._serving))
        # A launcher whose frontend is lost watches at another one, which may be this.
        for condemn in self._verdicts:
            frontend.send(wire.condemned_message(condemn))
        if self._refusal is not None:
            frontend.send(_refuse_new(self._refusal))

    def detach(self, frontend: Frontend) -> int:
        """It is gone, and its clients with it: whatever the core computes for them is cancelled.

        Returns how many calls it had.
        """
        self._frontends.remove(frontend)
        calls = [call_id for call_id, owner in self._calls.items() if owner is frontend]
        for call_id in calls:
            del self._calls[call_id]
        for request_id in [key for key, each in self._owned.items() if each.frontend is frontend]:
            del self._owned[request_id]
            self._post(Cancel(request_id, FRONTEND_GONE))
        self._sums.retire(frontend.name)
        self._scrapes = [each for each in self._scrapes if each.asker is not frontend]
        self._answer_scrapes(frontend)
        for cancel_id in [key for key, each in self._cancels.items() if each.owner is frontend]:
            self._answer_cancel(cancel_id, found=False)
        return len(calls)

    def take(self, frontend: Frontend, data: bytes) -> None:
        """Takes a message of an attached frontend. Raises DecodeError if it is none."""
        message = frontend_pb2.FromFrontend.FromString(data)
        match message.WhichOneof("kind"):
            case "submit":
                self._submit(frontend, message.submit)
            case "end":
                if self._disown(frontend, message.end.request_id):
                    self._post(End(message.end.request_id, message.end.output_count))
            case "cancel":
                if self._disown(frontend, message.cancel.request_id):
                    self._post(Cancel(message.cancel.request_id, message.cancel.reason))
            case "call_opened":
                self._open(frontend, message.call_opened)
            case "call_closed":
                if self._calls.get(message.call_closed.request_id) is frontend:
                    del self._calls[message.call_closed.request_id]
            case "metrics":
                self._sums.report(frontend.name, message.metrics.text)
                self._answer_scrapes(frontend)
            case "query":
                self._answer(frontend, message.query)
            case "flush_cache":
                self._flushing.append(frontend)
                self._post(FlushCache())
            case "listening":
                frontend.listening = True
            case "start_refused":
                frontend.refusal = message.start_refused.message
            case "refuses_new":
                frontend.refuses_new = True
            case "call_cancelled":
                cancelled = message.call_cancelled
                self._answer_cancel(cancelled.cancel_id, found=cancelled.found)
            case "pong":
                frontend.answered = True
            case kind:
                raise AssertionError(kind)

    # ---------------------------------------------------------------- the service's side

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core; unknown requests are those whose client left before."""
        match effect:
            case Tokens():
                self._deliver_tokens(effect)
            case Accepted(request_id=request_id):
                if (owned := self._owned.get(request_id)) is not None:
                    owned.frontend.send(wire.accepted_message(owned.choice.number, effect))
            case Failed(request_id=request_id, error=error):
                if (owned := self._owned.pop(request_id, None)) is not None:
                    owned.frontend.send(wire.failed_message(owned.choice.number, error))
            case CacheFlushed():
                self._flushing.popleft().send(wire.effect_message(effect))
            case ServingChanged():
                self._serving = effect
                self._tell_all(wire.effect_message(effect))
            case _:
                pass  # for dispatch

    def publish_verdict(self, condemn: Condemn) -> None:
        """Tells the launchers that watch at any frontend, now or later."""
        self._verdicts.add(condemn)
        self._tell_all(wire.condemned_message(condemn))

    def refuse_new(self, reason: str) -> None:
        """From now on every frontend refuses new calls with this reason."""
        if self._refusal is None:
            self._refusal = reason
            self._tell_all(_refuse_new(reason))

    def stop(self, reason: str) -> None:
        """Asks every frontend to answer what is open with an error, and to leave."""
        self._tell_all(frontend_pb2.ToFrontend(stop=frontend_pb2.Stop(reason=reason)))

    # ---------------------------------------------------------------- inside

    def _tell_all(self, message: frontend_pb2.ToFrontend) -> None:
        for frontend in self._frontends:
            frontend.send(message)

    def _open(self, frontend: Frontend, opened: frontend_pb2.CallOpened) -> None:
        request_id = opened.request_id
        if request_id in self._calls or request_id in self._owned:
            refused = frontend_pb2.CallRefused(
                request_id=request_id,
                number=opened.number,
                failure=wire.failure_of(taken(request_id)),
            )
            frontend.send(frontend_pb2.ToFrontend(call_refused=refused))
        else:
            self._calls[request_id] = frontend

    def _submit(self, frontend: Frontend, message: frontend_pb2.SubmitRequest) -> None:
        request_id, call_id = message.request_id, message.call_id
        if self._calls.get(call_id) is not frontend:
            return  # the call was refused, and its frontend does not know yet
        if request_id in self._owned or self._calls.get(request_id, frontend) is not frontend:
            frontend.send(wire.failed_message(message.number, taken(request_id)))
            return
        self._owned[request_id] = _Owned(frontend, Choice(message.number, request_id))
        self._post(wire.submit_of(message))

    def _disown(self, frontend: Frontend, request_id: str) -> bool:
        """Forgets a choice; False if it is over, or another frontend's: this one was refused it."""
        owned = self._owned.get(request_id)
        if owned is None or owned.frontend is not frontend:
            return False
        del self._owned[request_id]
        return True

    def _deliver_tokens(self, tokens: Tokens) -> None:
        """One message for each frontend that has a part in the step."""
        parts: dict[
            Frontend, tuple[list[tuple[Choice, TokenDelta]], list[tuple[Choice, PromptDelta]]]
        ] = {}
        for scores in tokens.prompt_deltas:
            if (owned := self._owned.get(scores.request_id)) is not None:
                parts.setdefault(owned.frontend, ([], []))[1].append((owned.choice, scores))
        for delta in tokens.deltas:
            if (owned := self._owned.get(delta.request_id)) is not None:
                parts.setdefault(owned.frontend, ([], []))[0].append((owned.choice, delta))
        for frontend, (rows, prompts) in parts.items():
            frontend.send(wire.tokens_message(rows, prompts))

    def _answer(self, frontend: Frontend, query: frontend_pb2.Query) -> None:
        match query.WhichOneof("kind"):
            case "status":
                content = self._status(self.calls_count)
                answer = frontend_pb2.Answer(query_id=query.query_id, content=content)
                frontend.send(frontend_pb2.ToFrontend(answer=answer))
            case "metrics":
                self._scrape(frontend, query)
            case "cancel_call":
                self._cancel(frontend, query)
            case kind:
                raise AssertionError(kind)

    def _cancel(self, frontend: Frontend, query: frontend_pb2.Query) -> None:
        """Only the owner knows whether there is something to end: its client may still read."""
        cancel = query.cancel_call
        self._last_cancel_id += 1
        cancel.cancel_id = self._last_cancel_id
        owner = self._calls.get(cancel.request_id, frontend)
        self._cancels[cancel.cancel_id] = _AskedCancel(frontend, query.query_id, owner)
        if owner is frontend:  # which has found nothing of this id
            self._answer_cancel(cancel.cancel_id, found=False)
        else:
            owner.send(frontend_pb2.ToFrontend(cancel_call=cancel))

    def _answer_cancel(self, cancel_id: int, *, found: bool) -> None:
        asker, query_id, _ = self._cancels.pop(cancel_id)
        answer = frontend_pb2.Answer(query_id=query_id, found=found)
        asker.send(frontend_pb2.ToFrontend(answer=answer))

    def _scrape(self, frontend: Frontend, query: frontend_pb2.Query) -> None:
        """The asker told what it counted just before."""
        if not query.metrics.fresh:  # it gave up the question before
            self._scrapes = [each for each in self._scrapes if each.asker is not frontend]
        others = {each for each in self._frontends if each.listening and each is not frontend}
        scrape = _Scrape(frontend, query.query_id, others if query.metrics.fresh else set())
        self._scrapes.append(scrape)
        for other in scrape.awaited:
            other.send(frontend_pb2.ToFrontend(report_metrics=frontend_pb2.ReportMetrics()))
        self._answer_scrapes(frontend)

    def _answer_scrapes(self, heard: Frontend) -> None:
        """Answers those that wait for nobody any more."""
        for scrape in self._scrapes:
            scrape.awaited.discard(heard)
            if not scrape.awaited:
                content, content_type = self._metrics_text()
                answer = frontend_pb2.Answer(
                    query_id=scrape.query_id, content=content, content_type=content_type
                )
                scrape.asker.send(frontend_pb2.ToFrontend(answer=answer))
        self._scrapes = [each for each in self._scrapes if each.awaited]


def _refuse_new(reason: str) -> frontend_pb2.ToFrontend:
    return frontend_pb2.ToFrontend(refuse_new=frontend_pb2.RefuseNew(reason=reason))
