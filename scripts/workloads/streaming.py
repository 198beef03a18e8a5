"""One streamed completion of an OpenAI-style server, and when each piece of it came.

h11 over asyncio: reading an event costs 80 µs of processor time, with httpx it is 180. On a machine
that serves and measures at once the difference would be part of what is measured.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import h11
import httpx

from scripts.workloads.prompts import Prompt

DEADLINE_S = 900.0
READ_BYTES = 1 << 16
ERROR_BYTES_MAX = 1 << 16
ERROR_CHARACTERS_MAX = 400
COUNT_MAX = 1 << 40
"""More tokens than any prompt or answer has."""
STREAM_END = b"[DONE]"


class RequestFailed(Exception):
    """A request got no complete answer. status: of HTTP; None if the connection or stream broke."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message if status is None else f"HTTP {status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """Where completions are asked for, and how.

    address: URL without /v1. ignore_eos: also send the fields `ignore_eos` and `stream_options`,
    which some servers refuse.
    """

    address: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def body(self, prompt: Prompt, tokens_max: int) -> bytes:
        """The request: greedy, streamed."""
        fields: dict[str, object] = {
            "model": self.model,
            "prompt": prompt.text,
            "max_tokens": tokens_max,
            "temperature": 0,
            "stream": True,
        }
        if self.ignore_eos:
            fields |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields).encode()


@dataclass(frozen=True)
class Answer:
    """A complete answer; times in seconds of time.perf_counter.

    sent_s: before connecting. times_s: of every chunk that carries output, never empty. The counts
    are the server's own; None where it tells none. expected_prompt_tokens, tokens_max: what was
    sent.
    """

    sent_s: float
    times_s: tuple[float, ...]
    expected_prompt_tokens: int
    tokens_max: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None

    @property
    def tokens_count(self) -> int:
        """Tokens of the answer; chunks where the server does not count."""
        return self.completion_tokens or len(self.times_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Times of each chunk and the next."""
        return list(zip(self.times_s, self.times_s[1:], strict=False))


async def complete(
    endpoint: Endpoint,
    prompt: Prompt,
    tokens_max: int,
    on_chunk: Callable[[int], None] = lambda _count: None,
) -> Answer:
    """Asks, and reads the answer to its end over a connection of its own.

    on_chunk: called with the number of chunks so far. Raises RequestFailed.
    """
    sent_s = time.perf_counter()
    stream = _Stream(on_chunk)
    try:
        with anyio.fail_after(DEADLINE_S):
            async with _exchange(endpoint, endpoint.body(prompt, tokens_max)) as exchange:
                await _read(exchange, stream)
    except TimeoutError as error:
        raise RequestFailed(f"no complete answer within {DEADLINE_S:g} s") from error
    except (OSError, h11.RemoteProtocolError) as error:
        raise RequestFailed(f"the connection broke: {error}") from error
    if not stream.times_s:
        raise RequestFailed("the answer has no text")
    return Answer(
        sent_s, tuple(stream.times_s), prompt.tokens_count, tokens_max, *_counts(stream.usage)
    )


def _counts(usage: object) -> tuple[int | None, int | None, int | None]:
    """Tokens of the prompt, of the answer, and cached ones. Raises RequestFailed at nonsense."""
    details = _member(usage, "prompt_tokens_details")
    counts = (
        _member(usage, "prompt_tokens"),
        _member(usage, "completion_tokens"),
        _member(details, "cached_tokens"),
    )
    for count in counts:
        # In Python true and false are numbers.
        known = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= COUNT_MAX
        if count is not None and not known:
            raise RequestFailed(f"its usage has a count that is none: {str(usage)[:200]}")
    return counts


def _member(value: object, name: str) -> Any:  # noqa: ANN401 - whatever the server sent
    """Of an object; None where there is none."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestFailed(f"its usage is no object of counts: {str(value)[:200]}")
    return value.get(name)


class _Exchange:
    """A request that was sent, and the events of its response. received_s: when the last came."""

    def __init__(self, http: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._http = http
        self._reader = reader
        self.received_s = 0.0

    async def next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            received = await self._reader.read(READ_BYTES)
            self.received_s = time.perf_counter()
            self._http.receive_data(received)
        return event


@asynccontextmanager
async def _exchange(endpoint: Endpoint, body: bytes) -> AsyncIterator[_Exchange]:
    url = httpx.URL(f"{endpoint.address}/v1/completions")
    encrypted = url.scheme == "https"
    port = url.port or (443 if encrypted else 80)
    reader, writer = await asyncio.open_connection(url.host, port, ssl=encrypted or None)
    try:
        http = h11.Connection(our_role=h11.CLIENT)
        headers = {
            "host": url.netloc.decode(),
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **endpoint.headers,
        }
        request = h11.Request(method="POST", target=url.raw_path, headers=list(headers.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        await writer.drain()
        yield _Exchange(http, reader)
    finally:
        writer.close()


async def _read(exchange: _Exchange, stream: "_Stream") -> None:
    status = 0
    refusal = b""
    while not stream.ended:
        event = await exchange.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            if status == httpx.codes.OK:
                stream.take(bytes(event.data), exchange.received_s)
            elif len(refusal) < ERROR_BYTES_MAX:
                refusal += event.data
        elif isinstance(event, h11.EndOfMessage):
            if status != httpx.codes.OK:
                raise RequestFailed(message_of(refusal), status)
            raise RequestFailed("the stream ended without [DONE]")


class _Stream:
    """Server-sent events, as their bytes come."""

    def __init__(self, on_chunk: Callable[[int], None]) -> None:
        self.times_s: list[float] = []
        self.usage: object = None
        self.ended = False
        self._on_chunk = on_chunk
        self._rest = b""

    def take(self, raw: bytes, received_s: float) -> None:
        """Reads complete lines. Raises RequestFailed at an event that is an error."""
        *lines, self._rest = (self._rest + raw).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == STREAM_END:
                self.ended = True
                return
            self._take_event(data, received_s)

    def _take_event(self, data: bytes, received_s: float) -> None:
        try:
            event = json.loads(data)
            if event.get("error"):
                raise RequestFailed(message_of(data))
            self.usage = event.get("usage") or self.usage
            choices = event.get("choices")
            if not choices:
                return
            text, finish_reason = choices[0].get("text"), choices[0].get("finish_reason")
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise RequestFailed(f"an event is no completion: {data[:100]!r}") from error
        if text is None or (finish_reason and not text):
            return
        self.times_s.append(received_s)
        self._on_chunk(len(self.times_s))


def message_of(raw: bytes) -> str:
    """What a refusal says, in the shapes servers use; else its beginning as it is."""
    text = raw.decode(errors="replace").strip()
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return str(said)[:ERROR_CHARACTERS_MAX] or "no reason was given"
