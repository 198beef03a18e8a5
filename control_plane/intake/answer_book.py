"""The table of answers in progress: all that intake tells the core or hears from it passes here."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from control_plane.errors import InvalidRequest, ServiceUnavailable
from control_plane.intake.admission import Admitted
from control_plane.intake.answer import Answer
from control_plane.intake.tokenizer import Tokenizer
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    Effect,
    End,
    Event,
    Failed,
    FlushCache,
    ServingChanged,
    Submit,
    Tokens,
)

DRAINING_RETRY_AFTER_S = 5.0


class AnswerBook:
    """For the event loop's thread only. post: takes an event; may call `deliver` meanwhile."""

    def __init__(self, post: Callable[[Event], None], tokenizer: Tokenizer) -> None:
        self._post = post
        self._tokenizer = tokenizer
        self._answers: dict[str, Answer] = {}
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._refusal: str | None = None
        self._serving_group_ids: tuple[str, ...] = ()

    @property
    def running_count(self) -> int:
        """Answers some client still waits for or reads."""
        return len(self._answers)

    @property
    def serving_group_ids(self) -> tuple[str, ...]:
        """Groups that can take requests; empty while new ones are refused."""
        return self._serving_group_ids if self._refusal is None else ()

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused, if they are."""
        return self._refusal

    # ---------------------------------------------------------------- the servers' side

    @contextmanager
    def answering(self, admitted: Admitted) -> Iterator[Answer]:
        """Submits the request; leaving the block before the end of the answer cancels it.

        Raises ServiceUnavailable while new requests are refused, InvalidRequest if the id is taken.
        """
        request = admitted.request
        if self._refusal is not None:
            raise ServiceUnavailable(self._refusal, retry_after_s=DRAINING_RETRY_AFTER_S)
        if request.request_id in self._answers:
            raise InvalidRequest(
                f"request_id: {request.request_id!r} is running already; send another or cancel it",
                field="request_id",
            )
        answer = Answer(
            admitted, self._tokenizer, lambda count: self._post(End(request.request_id, count))
        )
        self._answers[request.request_id] = answer
        try:
            if not answer.over:
                self._post(Submit(request))
            yield answer
        finally:
            del self._answers[request.request_id]
            if not answer.over:
                self._post(Cancel(request.request_id, "the client is gone"))

    def cancel(self, request_id: str, reason: str) -> bool:
        """Asks the core to stop a request; False if none of this id is queued or running."""
        answer = self._answers.get(request_id)
        if answer is None or answer.over:
            return False
        self._post(Cancel(request_id, reason))
        return True

    async def flush_cache(self) -> int:
        """Forgets every cached block nobody uses; returns how many became free."""
        flushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._post(FlushCache())
        return await flushed

    # ---------------------------------------------------------------- the service's side

    def refuse_new(self, reason: str) -> None:
        """From now on `answering` raises ServiceUnavailable."""
        self._refusal = self._refusal or reason

    def fail_all(self, reason: str) -> None:
        """Ends every answer and every flush in progress with ServiceUnavailable."""
        for request_id, answer in list(self._answers.items()):
            if not answer.over:
                answer.fail(ServiceUnavailable(reason, retry_after_s=DRAINING_RETRY_AFTER_S))
                self._post(Cancel(request_id, reason))
        while self._flushes:
            flushed = self._flushes.popleft()
            if not flushed.done():
                flushed.set_exception(ServiceUnavailable(reason))

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core; unknown requests are those whose client left before."""
        match effect:
            case Tokens(deltas=deltas):
                for delta in deltas:
                    if (answer := self._answers.get(delta.request_id)) is not None:
                        answer.take(delta)
            case Accepted(request_id=request_id, tokens_max=tokens_max):
                if (answer := self._answers.get(request_id)) is not None:
                    answer.accept(tokens_max)
            case Failed(request_id=request_id, error=error):
                if (answer := self._answers.get(request_id)) is not None:
                    answer.fail(error)
            case CacheFlushed(blocks_freed=blocks_freed):
                self._flushed(blocks_freed)
            case ServingChanged(group_ids=group_ids):
                self._serving_group_ids = group_ids
            case _:
                pass  # for dispatch

    def _flushed(self, blocks_freed: int) -> None:
        """Answers come in the order of the questions."""
        if self._flushes:
            flushed = self._flushes.popleft()
            if not flushed.done():
                flushed.set_result(blocks_freed)
