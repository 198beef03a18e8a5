"""Requests of gRPC count among what all clients may send, for as long as they are in memory."""

import sys
import weakref

import anyio
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from control_plane.errors import QueueFull
from control_plane.intake import wire
from control_plane.intake.byte_budget import ReadBudget
from control_plane.intake.message_budget import MessageBudget
from control_plane.message_guard import MessageGuard
from control_plane.scheduling.messages import Submit
from protos import admin_pb2, admin_pb2_grpc, inference_pb2
from tests.control_plane.intake.fake_core import until

pytestmark = pytest.mark.anyio

GENERATE = "/polychip.v1.InferenceService/Generate"


def padded(bytes_count):
    """A request for \"hi\" that needs so many bytes: of two prompts the last is taken."""
    first = inference_pb2.GenerateRequest(prompt="x" * bytes_count).SerializeToString()
    return first + inference_pb2.GenerateRequest(prompt="hi").SerializeToString()


async def ending(call):
    """Status of a call and its retry hint in seconds, None without one."""
    with anyio.fail_after(10):
        code = await call.code()
    status = await rpc_status.aio.from_call(call)
    hint = error_details_pb2.RetryInfo()
    found = status and any(packed.Unpack(hint) for packed in status.details)
    return code, hint.retry_delay.ToMilliseconds() / 1000 if found else None


async def test_all_requests_of_both_protocols_together_are_bounded(start, core):
    core.script = lambda _: []
    async with start(intake_bytes_max=4000) as s:
        generate = s.channel.unary_stream(GENERATE)
        first = generate(padded(2000))
        await until(lambda: len(core.of(Submit)) == 1)
        code, hint = await ending(generate(padded(2500)))
        assert (code, hint) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
        body = b'{"prompt": "hi"}' + b" " * 2500
        assert (await s.http.post("/v1/completions", content=body)).status_code == 429
        assert len(core.of(Submit)) == 1

        # What is small passes, and so does everything once the first call is over.
        status = admin_pb2.GetStatusRequest()
        assert (await admin_pb2_grpc.AdminServiceStub(s.channel).GetStatus(status)).version
        first.cancel()
        await until(lambda: s.intake.running_count == 0)
        second = generate(padded(3900))
        await until(lambda: len(core.of(Submit)) == 2)
        second.cancel()
        await until(lambda: s.intake.running_count == 0)


async def test_a_request_that_could_never_be_held_is_too_large(start):
    async with start(intake_bytes_max=4000) as s:
        code, hint = await ending(s.channel.unary_stream(GENERATE)(padded(5000)))
    assert (code, hint) == (grpc.StatusCode.RESOURCE_EXHAUSTED, None)


@pytest.mark.parametrize("raw", [b"\xff" * 900, padded(900)], ids=["no message", "answered"])
async def test_bytes_are_given_back_however_a_call_ends(start, raw):
    async with start(intake_bytes_max=1000) as s:
        cancel = s.channel.unary_unary("/polychip.v1.InferenceService/Cancel")
        for _ in range(4):
            code, _ = await ending(cancel(raw))
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)


async def test_nothing_keeps_the_message_while_the_answer_is_written(start, core, monkeypatch):
    seen = []

    def watched(message, *others):
        seen.append(message)
        return translate(message, *others)

    translate = wire.generation_input
    monkeypatch.setattr(wire, "generation_input", watched)
    core.script = lambda _: []
    async with start() as s:
        call = s.channel.unary_stream(GENERATE)(padded(10))
        await until(lambda: len(core.of(Submit)) == 1)
        references = sys.getrefcount(seen[0])
        assert references == 2, "the list above, and the argument of the call that counts"
        call.cancel()
        await until(lambda: s.intake.running_count == 0)


class Message:
    """Stands for one of protobuf's, which cannot be referred to weakly."""


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_only_the_behaviour_keeps_a_message(kind):
    decoded, budget = [], ReadBudget(10)

    def decode(_: bytes) -> Message:
        message = Message()
        decoded.append(weakref.ref(message))
        return message

    async def behaviour(request, _context):
        assert isinstance(request, Message)
        del request
        assert decoded[0]() is None
        with pytest.raises(QueueFull):
            budget.check(4)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    handler = make(behaviour, request_deserializer=decode)

    async def guarded(_):
        return await MessageGuard().intercept_service(plain, None)

    async def plain(_):
        return handler

    found = await MessageBudget(budget).intercept_service(guarded, None)
    request = found.request_deserializer(b"1234567")
    await getattr(found, kind)(request, None)
    budget.check(10)
