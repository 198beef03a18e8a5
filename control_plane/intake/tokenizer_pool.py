"""Threads that template and tokenize, so that a huge prompt never holds up the event loop."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from control_plane.errors import InvalidRequest
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.tokenizer import Tokenizer


class TokenizerPool:
    """`threads_count` 0 means half the physical cores, at least one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, threads_count: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._executor = ThreadPoolExecutor(
            threads_count or max(1, physical_cores_count() // 2), thread_name_prefix="tokenizer"
        )

    async def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, the model's start token included. Raises InvalidRequest."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        """Ids of a conversation; start tokens are the template's business. InvalidRequest."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._encode_chat, messages)

    def close(self) -> None:
        """Drops what waits; what runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return self._tokenizer.encode(text, add_special=True)
        except UnicodeEncodeError as error:
            raise _not_unicode("prompt", error) from error

    def _encode_chat(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        text = self._template.render(messages)
        try:
            return self._tokenizer.encode(text, add_special=False)
        except UnicodeEncodeError as error:
            raise _not_unicode("messages", error) from error


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
