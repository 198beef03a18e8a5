"""The client library against an in-process server: resume, errors, what a request carries."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from scripts.client import PolychipClient, ServiceRefused, ServiceUnreachable
from scripts.generation import Generation, Message, PromptLogprobs, TopTokens

ANSWER = list(range(100, 110))
DRAWN_SEED = 77
Behaviour = Callable[
    [inference_pb2.GenerateRequest, grpc.ServicerContext], Iterator[inference_pb2.GenerateResponse]
]


def resumed(request: inference_pb2.GenerateRequest, choice: int = 0) -> list[int]:
    """What the client says it has of a choice."""
    return list(request.resume_output_ids[choice].ids) if request.resume_output_ids else []


def answer_from(
    request: inference_pb2.GenerateRequest, until: int, choice: int = 0
) -> Iterator[inference_pb2.GenerateResponse]:
    """The rest of ANSWER after what the client has, two tokens a piece."""
    start = len(resumed(request, choice))
    assert resumed(request, choice) == ANSWER[:start]
    for index in range(start, until, 2):
        piece = ANSWER[index : index + 2]
        yield inference_pb2.GenerateResponse(
            first_index=index,
            token_ids=piece,
            text="".join(f"{token} " for token in piece),
            choice=choice,
            seed=request.sampling.seed if request.sampling.HasField("seed") else DRAWN_SEED,
        )


def last_piece(choice: int = 0, *, usage: bool = True) -> inference_pb2.GenerateResponse:
    piece = inference_pb2.GenerateResponse(
        first_index=len(ANSWER),
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        choice=choice,
    )
    if usage:
        piece.usage.CopyFrom(
            inference_pb2.Usage(prompt_tokens=3, completion_tokens=len(ANSWER), group="g0")
        )
    return piece


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers by a behaviour and keeps the requests."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.authorizations: list[object] = []

    def Generate(self, request, context):  # noqa: N802
        sent = inference_pb2.GenerateRequest()
        sent.CopyFrom(request)
        self.requests.append(sent)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
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
def serve() -> Iterator[Callable[..., tuple[PolychipClient, Inference]]]:
    closing: list[Callable[[], object]] = []

    def start(behaviour: Behaviour, **options: Any) -> tuple[PolychipClient, Inference]:
        inference = Inference(behaviour)
        server = grpc.server(ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        client = PolychipClient("127.0.0.1", port, **options)
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
    assert [len(resumed(request)) for request in inference.requests] == [0, 4, 4, 6]
    assert not inference.requests[0].sampling.HasField("seed")
    seeds = {request.sampling.seed for request in inference.requests[1:]}
    assert seeds == {DRAWN_SEED}, "every part must draw with the seed of the first"
    names = {request.request_id for request in inference.requests}
    assert len(names) == 4, "the service may still hold the request under its old name"


def test_resuming_without_progress_ends(serve) -> None:
    def stuck(request, context):
        yield from answer_from(request, 2)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone again")

    client, inference = serve(stuck, reconnect_deadline_s=1.0)
    began = time.monotonic()
    with pytest.raises(ServiceUnreachable):
        list(client.generate(Generation("hello")))
    assert 1.0 <= time.monotonic() - began < 5.0
    assert 3 <= len(inference.requests) <= 12, "tries have pauses between them"


def test_every_choice_goes_on_where_it_stopped(serve) -> None:
    first = True

    def breaking(request, context):
        nonlocal first
        if not first:
            assert request.sampling.seed == 5
            for choice in (2, 0, 1):
                yield from answer_from(request, len(ANSWER), choice)
                yield last_piece(choice, usage=choice == 1)
            return
        first = False
        yield from answer_from(request, 2, 0)
        yield from answer_from(request, len(ANSWER), 2)
        yield last_piece(2, usage=False)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the connection went")

    client, inference = serve(breaking)
    pieces = list(client.generate(Generation("hello", n=3, seed=5)))
    for choice in range(3):
        own = [piece for piece in pieces if piece.choice == choice]
        assert [token for piece in own for token in piece.token_ids] == ANSWER
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["stop"]
    assert [piece.usage is not None for piece in pieces].count(True) == 1
    assert pieces[-1].usage is not None
    assert [len(each.ids) for each in inference.requests[1].resume_output_ids] == [2, 0, 10]


def test_the_prompt_and_its_scores_come_once(serve) -> None:
    scores = [-0.5, -1.5, -2.5]
    tops = [inference_pb2.TopTokens(ids=[7, 8], logprobs=[-0.5, float("-inf")]) for _ in scores]
    first = True

    def scored(start: int, stop: int) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            prompt_logprobs=inference_pb2.PromptLogprobs(
                first_index=start + 1, logprobs=scores[start:stop], top_tokens=tops[start:stop]
            )
        )

    def breaking(request, context):
        nonlocal first
        assert request.sampling.prompt_logprobs == 2
        yield inference_pb2.GenerateResponse(prompt_ids=[1, 2], request_id="r", seed=9)
        yield scored(0, 2)
        if first:
            first = False
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection went")
        yield inference_pb2.GenerateResponse(prompt_ids=[3, 4])
        yield scored(1, 3)
        yield from undisturbed(request, context)

    client, _ = serve(breaking)
    pieces = list(client.generate(Generation((1, 2, 3, 4), prompt_logprobs=2)))
    assert [each for piece in pieces for each in piece.prompt_ids] == [1, 2, 3, 4]
    top = TopTokens(ids=(7, 8), logprobs=(-0.5, float("-inf")))
    assert [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs] == [
        PromptLogprobs(1, (-0.5, -1.5), (top, top)),
        PromptLogprobs(3, (-2.5,), (top,)),
    ]
    assert [token for piece in pieces for token in piece.token_ids] == ANSWER


def test_the_deadline_is_one_of_the_whole_answer(serve) -> None:
    remaining_s = []

    def breaking(request, context):
        remaining_s.append(context.time_remaining())
        yield from answer_from(request, 2)
        if len(remaining_s) == 1:
            time.sleep(0.3)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection went")
        while context.is_active():
            time.sleep(0.02)

    client, _ = serve(breaking)
    with pytest.raises(ServiceRefused) as caught:
        list(client.generate(Generation("hello", deadline_s=1.0)))
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert remaining_s[0] > 0.8
    assert remaining_s[1] < 0.7


def test_every_field_is_sent_and_only_what_was_given(serve) -> None:
    client, inference = serve(undisturbed, api_key="secret")
    values: dict[str, Any] = {
        "temperature": 0.5,
        "max_tokens": 10,
        "seed": 1,
        "ignore_eos": True,
        "logprobs": True,
        "n": 2,
        "top_k": -1,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "min_tokens": 3,
        "top_logprobs": 4,
        "prompt_logprobs": 0,
    }
    lists = {"stop_token_ids": (1, 2), "stop": ("a", "b"), "logit_bias": {5: -2.0}}
    outer = {"model": "m", "request_id": "r", "priority": 0, "cache_salt": "s"}
    list(client.generate(Generation("hello", **values, **lists, **outer)))
    list(client.generate(Generation("hello")))
    full, bare = inference.requests
    sampling = full.sampling
    assert {name: getattr(sampling, name) for name in values} == values
    assert all(sampling.HasField(name) for name in values)
    assert (list(sampling.stop_token_ids), list(sampling.stop)) == ([1, 2], ["a", "b"])
    assert dict(sampling.logit_bias) == {5: -2.0}
    assert {name: getattr(full, name) for name in outer} == outer
    assert full.HasField("priority")
    given = {field.name for field, _ in bare.sampling.ListFields()}
    assert given <= {"ignore_eos", "logprobs"}
    assert {field.name for field, _ in bare.ListFields()} == {"prompt", "sampling"}
    assert inference.authorizations == ["Bearer secret"] * 2


def test_a_message_that_is_too_large_is_refused_in_words(serve) -> None:
    client, _ = serve(undisturbed)
    with pytest.raises(ServiceRefused, match="--client-message-bytes") as caught:
        list(client.generate(Generation("x" * (5 << 20))))
    assert caught.value.code == "RESOURCE_EXHAUSTED"


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
