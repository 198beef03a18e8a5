"""The table of calls in progress: all that intake tells the core or hears from it passes here."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from control_plane.errors import InvalidRequest, RequestError, ServiceUnavailable
from control_plane.intake.generation import Generation, IntakeParts
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Effect,
    Failed,
    FlushCache,
    ServingChanged,
    Tokens,
)

DRAINING_RETRY_AFTER_S = 5.0
REQUEST_ID_CHARACTERS_MAX = 128


class AnswerBook:
    """For the event loop's thread only. opened, closed: told the id of each call that gets in."""

    def __init__(
        self,
        parts: IntakeParts,
        opened: Callable[[str], None] = lambda _: None,
        closed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._parts = parts
        self._opened = opened
        self._closed = closed
        self._calls: dict[str, Generation] = {}
        """By the client's id."""
        self._choices: dict[str, Generation] = {}
        """By the core's ids."""
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._refusal: str | None = None
        self._serving_group_ids: tuple[str, ...] = ()

    @property
    def running_count(self) -> int:
        """Calls some client still waits for or reads."""
        return len(self._calls)

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
    def open(self, request_id: str, protocol: str) -> Iterator[Generation]:
        """A call arrived; leaving the block before its end cancels it.

        request_id: the client's; drawn if empty. protocol: "http" or "grpc", for the metrics.
        Raises ServiceUnavailable while new calls are refused, InvalidRequest if the id is no good.
        """
        generation = Generation(request_id or uuid4().hex, protocol, self._parts, self._register)
        try:
            self._enter(generation)
        except RequestError as error:
            generation.fail(error)
            raise
        try:
            yield generation
        except RequestError as error:
            generation.fail(error)
            raise
        finally:
            del self._calls[generation.request_id]
            generation.client_left()
            for core_id in generation.core_ids:
                del self._choices[core_id]
            self._closed(generation.request_id)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Ends a call with RequestCancelled, from its arrival on; False if none of this id is in
        progress."""
        generation = self._calls.get(request_id)
        return generation is not None and generation.cancel(reason)

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Ends a call with an error, if it is still in progress."""
        if (generation := self._calls.get(request_id)) is not None:
            generation.fail(error)

    async def flush_cache(self) -> int:
        """Forgets every cached block nobody uses; returns how many became free."""
        flushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._parts.post(FlushCache())
        return await flushed

    # ---------------------------------------------------------------- the service's side

    def refuse_new(self, reason: str) -> None:
        """From now on `open` raises ServiceUnavailable; calls that arrived before go on."""
        self._refusal = self._refusal or reason

    def fail_all(self, reason: str) -> None:
        """Ends every call and every flush in progress with ServiceUnavailable."""
        for generation in list(self._calls.values()):
            generation.fail(ServiceUnavailable(reason, retry_after_s=DRAINING_RETRY_AFTER_S))
        while self._flushes:
            flushed = self._flushes.popleft()
            if not flushed.done():
                flushed.set_exception(ServiceUnavailable(reason))

    def deliver(self, effect: Effect) -> None:
        """Takes an effect of the core; unknown requests are those whose client left before."""
        match effect:
            case Tokens():
                self._deliver_tokens(effect)
            case Accepted(request_id=request_id):
                if (generation := self._choices.get(request_id)) is not None:
                    generation.accepted(effect)
            case Failed(request_id=request_id):
                if (generation := self._choices.get(request_id)) is not None:
                    generation.failed(effect)
            case CacheFlushed(blocks_freed=blocks_freed):
                self._flushed(blocks_freed)
            case ServingChanged(group_ids=group_ids):
                self._serving_group_ids = group_ids
            case _:
                pass  # for dispatch

    # ---------------------------------------------------------------- inside

    def _enter(self, generation: Generation) -> None:
        if self._refusal is not None:
            raise ServiceUnavailable(self._refusal, retry_after_s=DRAINING_RETRY_AFTER_S)
        request_id = generation.request_id
        _check_request_id(request_id)
        if request_id in self._calls or request_id in self._choices:
            raise taken(request_id)
        self._calls[request_id] = generation
        self._opened(request_id)

    def _register(self, generation: Generation, core_ids: Iterable[str]) -> None:
        """Choices of a call have ids of their own, which nobody else may use."""
        core_ids = tuple(core_ids)
        for core_id in core_ids:
            if core_id in self._choices or self._calls.get(core_id, generation) is not generation:
                raise taken(core_id)
        self._choices.update(dict.fromkeys(core_ids, generation))

    def _deliver_tokens(self, tokens: Tokens) -> None:
        for scores in tokens.prompt_deltas:
            if (generation := self._choices.get(scores.request_id)) is not None:
                generation.take_prompt(scores)
        for delta in tokens.deltas:
            if (generation := self._choices.get(delta.request_id)) is not None:
                generation.take(delta)

    def _flushed(self, blocks_freed: int) -> None:
        """Answers come in the order of the questions."""
        if self._flushes:
            flushed = self._flushes.popleft()
            if not flushed.done():
                flushed.set_result(blocks_freed)


def taken(request_id: str) -> InvalidRequest:
    """What a second call of an id is told while the first is in progress."""
    return InvalidRequest(
        f"request_id: {request_id!r} is running already; send another or cancel it",
        field="request_id",
    )


def _check_request_id(request_id: str) -> None:
    if len(request_id) > REQUEST_ID_CHARACTERS_MAX:
        raise InvalidRequest(
            f"request_id: {len(request_id)} characters are more than {REQUEST_ID_CHARACTERS_MAX}; "
            "send a shorter one or none",
            field="request_id",
        )
    if not request_id.isprintable():
        raise InvalidRequest(
            f"request_id: {request_id!a} holds characters that cannot be printed; send letters, "
            "digits and signs, or none",
            field="request_id",
        )
