"""Threads that template and tokenize, so that a huge prompt never holds up the event loop."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from control_plane.errors import InvalidRequest, QueueFull
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.tokenizer import Tokenizer

RETRY_AFTER_S = 1.0

Argument = TypeVar("Argument")


class TokenizerPool:
    """waiting_max: most texts in work or waiting for a thread; QueueFull beyond them.

    context_tokens: a text that cannot have fewer is refused without the seconds it would take.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        threads_count: int,
        *,
        waiting_max: int,
        context_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._executor = ThreadPoolExecutor(threads_count, thread_name_prefix="tokenizer")
        self._waiting_max = waiting_max
        self._context_tokens = context_tokens
        self._waiting_count = 0

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, the model's start token included. InvalidRequest, QueueFull."""
        return await self._run(self._encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        """Ids of a conversation; start tokens are the template's business. Raises likewise."""
        return await self._run(self._encode_chat, messages)

    def close(self) -> None:
        """Drops what waits; what runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, work: Callable[[Argument], tuple[int, ...]], argument: Argument
    ) -> tuple[int, ...]:
        if self._waiting_count >= self._waiting_max:
            raise QueueFull(
                f"{self._waiting_count} prompts wait to be tokenized, and no more may: try again "
                f"in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting_count += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, work, argument)
        finally:
            self._waiting_count -= 1

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


def physical_cores_count() -> int:
    """Cores without their hyperthreads, where the machine tells; else what Python counts."""
    siblings = {
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    return len(siblings) or os.cpu_count() or 1
