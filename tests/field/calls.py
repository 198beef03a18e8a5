"""Calls on threads of their own, which their client may leave at any moment, as clients do."""

import http.client
import json
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
from typing_extensions import override

from protos import inference_pb2, inference_pb2_grpc
from tests.field.answers import (
    Answer,
    Refused,
    SseStream,
    answer_of_body,
    answer_of_messages,
    answer_of_stream,
    http_refusal,
    sse_events,
    strict_json,
)
from tests.field.field_cluster import CALL_DEADLINE_S, FieldCluster, Prompt

POLL_S = 0.005
PAUSE_LOOK_S = 0.05
LEFT = "left"


class ClientLeft(Exception):
    """Our own side of the call closed it before its end."""


class OpenCall(ABC):
    """One request. The constructor sends it; `leave` closes it, however far it is."""

    def __init__(self, field: FieldCluster) -> None:
        self.tokens_count = 0
        """Tokens that came so far, of all choices; none before the end of an unstreamed answer."""
        self.arrivals: list[float] = []
        """When each piece came, in seconds of the monotonic clock."""
        self.pause_s = 0.0
        """How long it waits after a piece with tokens before it reads on; inf: it reads no more."""
        self.request_id = ""
        """What the service calls the request; over HTTP known once the first piece is here."""
        self._field = field
        self._left = False
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the call has ended on our side."""
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Closes the call; the service is not told in any other way."""
        self._left = True
        self._close()

    def cancel(self) -> bool:
        """Cancels the request by another call; whether the service still had it."""
        request = inference_pb2.CancelRequest(request_id=self.request_id)
        return bool(self._field.client.inference.Cancel(request, CALL_DEADLINE_S).found)

    def wait_for_tokens(self, count: int) -> None:
        """Returns once so many tokens came."""
        wait_until(lambda: self.tokens_count >= count or self.is_over, f"{count} tokens")
        if self.tokens_count < count:
            raise AssertionError(f"the call is over: {self.outcome()}") from self._error

    def answer(self) -> Answer:
        """The finished answer; raises Refused, ClientLeft, or what went wrong."""
        self._thread.join(CALL_DEADLINE_S)
        assert self.is_over, "the call has no end"
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def outcome(self) -> str:
        """`stop` or `length` (of the first choice), the reason of a refusal, or LEFT."""
        try:
            return str(self.answer().choices[0].finish)
        except Refused as refused:
            return refused.reason or refused.code.name
        except ClientLeft:
            return LEFT

    def _run(self) -> None:
        try:
            self._answer = self._read()
        except BaseException as error:  # noqa: BLE001 - for whoever asks for the answer
            self._error = error
            # Whatever we see of a call that we closed is our own doing, unless it was refused.
            if self._left and not (isinstance(error, Refused) and error.reason):
                self._error = ClientLeft()

    def _pause(self, tokens_count: int) -> None:
        """Looks again and again, since whoever made us slow may let us go on."""
        began = time.monotonic()
        while tokens_count and not self._left and time.monotonic() < began + self.pause_s:
            time.sleep(min(PAUSE_LOOK_S, self.pause_s))

    @abstractmethod
    def _read(self) -> Answer: ...

    @abstractmethod
    def _close(self) -> None: ...


class GrpcCall(OpenCall):
    """Generate; leaving cancels the call. deadline_s: what the client gives it. channel: one of its
    own instead of the one all share.
    """

    def __init__(
        self,
        field: FieldCluster,
        prompt: Prompt,
        *,
        deadline_s: float = CALL_DEADLINE_S,
        channel: grpc.Channel | None = None,
        **parameters: object,
    ) -> None:
        super().__init__(field)
        request = field.grpc_request(prompt, **parameters)
        self.request_id = request.request_id
        stub = field.client.inference
        if channel is not None:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._call = stub.Generate(request, deadline_s)
        self._thread.start()

    @override
    def _read(self) -> Answer:
        return answer_of_messages(self._noted())

    def _noted(self) -> Iterator[inference_pb2.GenerateResponse]:
        for message in self._call:
            self.arrivals.append(time.monotonic())
            self.request_id = self.request_id or message.request_id
            self.tokens_count += len(message.token_ids)
            yield message
            self._pause(len(message.token_ids))

    @override
    def _close(self) -> None:
        self._call.cancel()


class HttpCall(OpenCall):
    """A POST on a connection of its own; leaving closes the connection. receive_bytes: what the
    kernel holds for us unread; None leaves it to the kernel.
    """

    def __init__(
        self,
        field: FieldCluster,
        prompt: Prompt,
        *,
        stream: bool,
        receive_bytes: int | None = None,
        **parameters: object,
    ) -> None:
        super().__init__(field)
        self._path, body = field.http_request(prompt, **parameters)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        self._body = json.dumps(body).encode()
        address = field.cluster.http.removeprefix("http://")
        self._connection = http.client.HTTPConnection(address, timeout=CALL_DEADLINE_S)
        self._socket = self._connection.sock = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(CALL_DEADLINE_S)
        self._socket.connect((self._connection.host, self._connection.port))
        self._thread.start()

    @override
    def _read(self) -> Answer:
        headers = {"Content-Type": "application/json"}
        try:
            self._connection.request("POST", self._path, self._body, headers)
            with self._connection.getresponse() as response:
                return self._read_response(response)
        finally:
            self._connection.close()

    def _read_response(self, response: http.client.HTTPResponse) -> Answer:
        stream = SseStream(response.status, response.headers.get("content-type", ""))
        if response.status != 200:
            raise http_refusal(response.status, response.read().decode())
        if not stream.content_type.startswith("text/event-stream"):
            return answer_of_body(strict_json(response.read().decode()))
        for data in sse_events(line.decode().rstrip("\n") for line in response):
            stream.events.append((time.monotonic(), data))
            self._pause(self._note(data))
        return answer_of_stream(stream)

    def _note(self, data: str) -> int:
        """Tokens of an event."""
        self.arrivals.append(time.monotonic())
        if data == "[DONE]":
            return 0
        chunk: dict[str, Any] = strict_json(data)
        self.request_id = self.request_id or chunk.get("id", "")
        count = sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices", ()))
        self.tokens_count += count
        return count

    @override
    def _close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def open_call(field: FieldCluster, protocol: str, prompt: Prompt, **parameters: object) -> OpenCall:
    """Sends what `field.ask` would send and does not wait. protocol: one of PROTOCOLS."""
    if protocol == "grpc":
        return GrpcCall(field, prompt, **parameters)
    return HttpCall(field, prompt, stream=protocol == "http-stream", **parameters)


def leave_all(calls: list[OpenCall]) -> list[str]:
    """Leaves every call and waits until each is over; their outcomes."""
    for call in calls:
        call.leave()
    return [call.outcome() for call in calls]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    """Polls until the condition holds; fails after the deadline, saying what was waited for."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {deadline_s} s"
        time.sleep(POLL_S)


def running_count(field: FieldCluster) -> int:
    """Choices in a slot, over all groups."""
    return sum(group.running for group in field.status().groups)


def waiting_count(field: FieldCluster) -> int:
    """Choices in a queue, over all groups."""
    return sum(group.waiting for group in field.status().groups)
