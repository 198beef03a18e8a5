"""Threads that template and tokenize, so that a huge prompt never holds up the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from control_plane.errors import InvalidRequest
from control_plane.intake.byte_budget import ByteBudget, bytes_of
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.tokenizer import Tokenizer

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class TokenizerJob(Generic[Result]):
    """Work in the pool, for one who waits; `abandon` when nobody does any more."""

    def __init__(self, work: "Future[Result]") -> None:
        self._work = work
        self._future = asyncio.wrap_future(work)

    async def result(self) -> Result:
        """Waits for it; raises what it raised."""
        return await self._future

    def abandon(self) -> None:
        """Drops it if no thread has taken it up; one that runs is not waited for."""
        self._work.cancel()
        if not self._future.cancel() and not self._future.cancelled():
            self._future.exception()  # else the loop reports one that nobody asked for


class TokenizerPool:
    """budget: texts in work or waiting for a thread count there until their thread is done.

    context_tokens: a text that cannot have fewer is refused without the seconds it would take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        threads_count: int,
        *,
        budget: ByteBudget,
        context_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._executor = ThreadPoolExecutor(threads_count, thread_name_prefix="tokenizer")
        self._budget = budget
        self._context_tokens = context_tokens

    def encode(self, text: str) -> TokenizerJob[tuple[int, ...]]:
        """Ids of plain text, the model's start token included. Raises QueueFull; the job raises
        InvalidRequest."""
        return self._begin(self._encode, text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]]
    ) -> TokenizerJob[tuple[int, ...]]:
        """Ids of a conversation; start tokens are the template's business. Raises likewise."""
        return self._begin(self._encode_chat, messages)

    def decode(self, token_ids: tuple[int, ...]) -> TokenizerJob[str]:
        """The text of the ids, which are in the vocabulary. Raises QueueFull."""
        return self._begin(self._tokenizer.decode, token_ids)

    def close(self) -> None:
        """Drops what waits; what runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(
        self, work: Callable[[Argument], Result], argument: Argument
    ) -> TokenizerJob[Result]:
        bytes_count = bytes_of(argument)
        self._budget.take(bytes_count)
        # The executor keeps its own record of work that was abandoned, but not the text in it.
        cell = [argument]
        try:
            future = self._executor.submit(lambda: work(cell.pop()))
        except RuntimeError:
            self._budget.release(bytes_count)
            raise

        def done(_future: "Future[Result]") -> None:
            cell.clear()
            self._budget.release(bytes_count)

        future.add_done_callback(done)
        return TokenizerJob(future)

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._encode_field("prompt", text, add_special=True)

    def _encode_chat(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        text = self._template.render(messages)
        return self._encode_field("messages", text, add_special=False)

    def _encode_field(self, field: str, text: str, *, add_special: bool) -> tuple[int, ...]:
        try:
            text_bytes = text.encode()
        except UnicodeEncodeError as error:
            raise _not_unicode(field, error) from error
        # Strictly more: the start token may be dropped from what the text itself gives.
        if self._tokenizer.tokens_min(text_bytes) > self._context_tokens:
            raise InvalidRequest(
                f"{field}: {len(text_bytes)} bytes of text cannot fit the context of "
                f"{self._context_tokens} tokens with room for output; send at most "
                f"{self._context_tokens - 1} tokens",
                field=field,
            )
        return self._tokenizer.encode(text, add_special=add_special)


def _not_unicode(field: str, error: UnicodeEncodeError) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: not valid Unicode ({error.reason}); send characters, not halves of them",
        field=field,
    )
