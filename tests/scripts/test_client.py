"""The client library against an in-process server: resume, errors, what a request carries."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from scripts.client import (
    Generation,
    Message,
    PolychipClient,
    ServiceRefused,
    ServiceUnreachable,
)

ANSWER = list(range(100, 110))
Behaviour = Callable[
    [inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]
]


def answer_from(
    request: inference_pb2.GenerateRequest, until: int
) -> Iterator[inference_pb2.GenerateResponse]:
    """The rest of ANSWER after what the client has, two tokens a piece."""
    start = len(request.resume_output_ids)
    assert list(request.resume_output_ids) == ANSWER[:start]
    for index in range(start, until, 2):
        piece = ANSWER[index : index + 2]
        yield inference_pb2.GenerateResponse(
            first_index=index, token_ids=piece, text="".join(f"{token} " for token in piece)
        )


def last_piece() -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        first_index=len(ANSWER),
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=len(ANSWER), group="g0"),
    )


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers by a behaviour and keeps the requests."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[inference_pb2.GenerateRequest] = []

    def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        yield from self.behaviour(request, context)

    def Cancel(self, request, context):  # noqa: ARG002, N802
        return inference_pb2.CancelResponse(found=request.request_id == "known")

    def GetModelInfo(self, request, context):  # noqa: ARG002, N802
        return inference_pb2.GetModelInfoResponse(names=["small", "default"], end_token_ids=[2])


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def GetStatus(self, request, context):  # noqa: ARG002, N802
        return admin_pb2.GetStatusResponse(
            workers=[admin_pb2.WorkerStatus(id="chip0", incarnation=(1 << 64) - 1)],
            groups=[admin_pb2.GroupStatus(id="g0", ranks=["chip0"])],
        )

    def FlushCache(self, request, context):  # noqa: ARG002, N802
        return admin_pb2.FlushCacheResponse(blocks_freed=5)


@pytest.fixture
def serve() -> Iterator[Callable[[Behaviour], tuple[PolychipClient, Inference]]]:
    closing: list[Callable[[], object]] = []

    def start(behaviour: Behaviour) -> tuple[PolychipClient, Inference]:
        inference = Inference(behaviour)
        server = grpc.server(ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = PolychipClient("127.0.0.1", port)
        closing.extend((client.close, lambda: server.stop(None).wait()))
        return client, inference

    yield start
    for close in closing:
        close()


def undisturbed(request, context):  # noqa: ARG001
    yield from answer_from(request, len(ANSWER))
    yield last_piece()


def test_an_answer_comes_in_pieces(serve) -> None:
    client, inference = serve(undisturbed)
    pieces = list(client.generate(Generation((Message("user", "hello"),), max_tokens=10)))
    assert [token for piece in pieces for token in piece.token_ids] == ANSWER
    assert pieces[-1].finish_reason == "stop"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(ANSWER)
    assert all(piece.usage is None for piece in pieces[:-1])
    request = inference.requests[0]
    assert request.chat.messages[0].content == "hello"
    assert request.sampling.max_tokens == 10
    assert not request.sampling.HasField("temperature")


def test_a_lost_connection_is_resumed_without_gap_or_repeat(serve) -> None:
    breaks = iter((4, 4, 6))

    def breaking(request, context):
        until = next(breaks, None)
        if until is None:
            yield from undisturbed(request, context)
            return
        yield from answer_from(request, until)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the connection went")

    client, inference = serve(breaking)
    lost: list[int] = []
    generation = Generation("hello", request_id="mine")
    pieces = list(client.generate(generation, lambda: lost.append(len(inference.requests))))
    assert lost == [1, 3], "told once for each loss, not for each try"
    assert [token for piece in pieces for token in piece.token_ids] == ANSWER
    assert "".join(piece.text for piece in pieces) == "".join(f"{token} " for token in ANSWER)
    assert [len(request.resume_output_ids) for request in inference.requests] == [0, 4, 4, 6]
    seeds = {request.sampling.seed for request in inference.requests}
    assert len(seeds) == 1, "every part must draw with the same seed"
    names = {request.request_id for request in inference.requests}
    assert len(names) == 4, "the service may still hold the request under its old name"


def test_resuming_without_progress_ends(serve) -> None:
    def stuck(request, context):
        yield from answer_from(request, 2)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone again")

    client, inference = serve(stuck)
    with pytest.raises(ServiceUnreachable):
        list(client.generate(Generation("hello")))
    assert 3 <= len(inference.requests) <= 10


def test_another_error_is_not_resumed(serve) -> None:
    def failing(request, context):
        yield from answer_from(request, 2)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: 0; at least 1")

    client, inference = serve(failing)
    with pytest.raises(ServiceRefused, match="max_tokens: 0; at least 1") as caught:
        list(client.generate(Generation("hello")))
    assert caught.value.code == "INVALID_ARGUMENT"
    assert len(inference.requests) == 1


def test_closing_the_iterator_cancels(serve) -> None:
    cancelled = threading.Event()

    def endless(request, context):
        context.add_callback(cancelled.set)
        while context.is_active():
            yield from answer_from(request, 2)

    client, _ = serve(endless)
    stream = client.generate(Generation((1, 2, 3)))
    next(stream)
    stream.close()
    assert cancelled.wait(10)


def test_nothing_listens() -> None:
    with PolychipClient("127.0.0.1", 1) as client:
        with pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:1"):
            list(client.generate(Generation("hello")))
        with pytest.raises(ServiceUnreachable):
            client.status()


def test_status_and_steering(serve) -> None:
    client, _ = serve(undisturbed)
    status = client.status()
    assert status["workers"][0]["incarnation"] == (1 << 64) - 1
    assert status["groups"][0]["ranks"] == ["chip0"]
    assert status["groups"][0]["blocks"] == {"free": 0, "cached": 0, "referenced": 0, "total": 0}
    assert status["requests"]["running"] == 0
    assert client.flush_cache() == 5
    assert client.model_info()["names"] == ["small", "default"]
    assert client.cancel("known")
    assert not client.cancel("unknown")
