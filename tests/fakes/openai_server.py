"""A server of /v1/completions that counts words as tokens, and answers as it is told to."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]


class OpenAIServer:
    """A context manager; runs in a thread of its own.

    first_token_s, token_s: pauses before the first token and between tokens. extra_tokens: counted
    in every prompt above its words. usage_changes: what the usage has instead. tokens_max: answers
    end after so many. last_event: is sent in place of [DONE]. refuse: the response to a request
    instead of an answer, or None. bodies: what was asked, in order. calls: method and path of
    everything, also of other servers that share it.
    """

    def __init__(
        self,
        *,
        owner: str = "somebody",
        context_tokens: int | None = None,
        first_token_s: float = 0.0,
        token_s: float = 0.0,
        extra_tokens: int = 0,
        tokens_max: int = 1 << 20,
        usage: bool = True,
        usage_changes: Body | None = None,
        last_event: bytes = b"data: [DONE]\n\n",
        refuse: Callable[[Request, Body], Response | None] = lambda *_: None,
        calls: list[tuple[str, str]] | None = None,
    ) -> None:
        self.owner = owner
        self.context_tokens = context_tokens
        self.first_token_s = first_token_s
        self.token_s = token_s
        self.extra_tokens = extra_tokens
        self.tokens_max = tokens_max
        self.usage = usage
        self.usage_changes = usage_changes or {}
        self.last_event = last_event
        self.refuse = refuse
        self.calls = [] if calls is None else calls
        self.bodies: list[Body] = []
        self.at_once = self.at_once_max = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/admin/cache/flush", self._flush, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes), lifespan="off", ws="none", log_level="critical"
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> "OpenAIServer":
        self._thread.start()
        deadline = time.monotonic() + 30.0
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake server does not start"
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(30.0)
        self._socket.close()

    async def _models(self, request: Request) -> Response:
        self._note(request)
        if (refusal := self.refuse(request, {})) is not None:
            return refusal
        model: Body = {"id": "words", "owned_by": self.owner}
        if self.context_tokens is not None:
            model["max_model_len"] = self.context_tokens
        return JSONResponse({"data": [model]})

    async def _health(self, request: Request) -> Response:
        self._note(request)
        return JSONResponse({"status": "serving", "version": "1.2.3"})

    async def _flush(self, request: Request) -> Response:
        self._note(request)
        return JSONResponse({"blocks_freed": 7})

    async def _completions(self, request: Request) -> Response:
        self._note(request)
        body = await request.json()
        self.bodies.append(body)
        if (refusal := self.refuse(request, body)) is not None:
            return refusal
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: Body) -> AsyncIterator[bytes]:
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        count = min(body["max_tokens"], self.tokens_max)
        await asyncio.sleep(self.first_token_s)
        for index in range(count):
            if index:
                await asyncio.sleep(self.token_s)
            yield event({"choices": [{"text": " word", "finish_reason": None}]})
        self.at_once -= 1
        yield event({"choices": [{"text": "", "finish_reason": "length"}]})
        if self.usage:
            prompt_tokens = len(body["prompt"].split()) + self.extra_tokens
            counts = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
            details = {"prompt_tokens_details": {"cached_tokens": 5}}
            yield event({"choices": [], "usage": counts | details | self.usage_changes})
        yield self.last_event

    def _note(self, request: Request) -> None:
        self.calls.append((self.address, f"{request.method} {request.url.path}"))


def event(content: Body) -> bytes:
    """As a server sends it."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"
