"""gRPC over loopback against a scripted core: generation, health, errors, administration."""

import struct
from dataclasses import replace

import anyio
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from control_plane.config import ControlPlaneConfig
from control_plane.errors import (
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestCancelled,
    ServiceUnavailable,
    WorkerFailure,
)
from control_plane.intake.front import Intake
from control_plane.scheduling.messages import Cancel, Condemn, End, ServingChanged, Submit
from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.control_plane.intake.fake_core import END, delta, failing, saying, until

pytestmark = pytest.mark.anyio

Generate = inference_pb2.GenerateRequest


def inference(s):
    return inference_pb2_grpc.InferenceServiceStub(s.channel)


def admin(s):
    return admin_pb2_grpc.AdminServiceStub(s.channel)


async def answer(s, **fields):
    return [piece async for piece in inference(s).Generate(Generate(**fields))]


async def refusal(s, **fields):
    """The status a request ends with, and its rich details by type."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(s, **fields)
    return details_of(caught.value)


def details_of(error):
    details = {}
    for packed in rpc_status.from_call(error).details:
        for kind in ("ErrorInfo", "BadRequest", "RetryInfo"):
            message = getattr(error_details_pb2, kind)()
            if packed.Unpack(message):
                details[kind] = message
    return error.code().name, error.details(), details


async def test_generate_streams_and_describes_itself(start, core):
    core.script = saying("né 👍")
    async with start() as s:
        pieces = await answer(
            s,
            request_id="mine",
            prompt="hi",
            sampling={"temperature": 0.5, "seed": 2**64 - 1, "logprobs": True},
        )
    assert (pieces[0].request_id, pieces[0].prompt_ids) == ("mine", [104, 105])
    assert not any(piece.request_id or piece.prompt_ids for piece in pieces[1:])
    assert "".join(piece.text for piece in pieces) == "né 👍"
    assert not any("\ufffd" in piece.text for piece in pieces)
    ids = [each for piece in pieces for each in piece.token_ids]
    assert ids == [*"né 👍".encode(), END]
    indexes = [p.first_index + i for p in pieces for i in range(len(p.token_ids))]
    assert indexes == list(range(len(ids)))
    assert sum(len(piece.logprobs) for piece in pieces) == len(ids)
    assert [p.finish_reason for p in pieces if p.finish_reason] == [
        inference_pb2.FINISH_REASON_STOP
    ]
    usage = pieces[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, len(ids), 3)
    assert (usage.group, usage.failovers, usage.retractions) == ("g1", 1, 2)
    assert usage.seed == 2**64 - 1
    assert core.last_request.deadline is None


async def test_chat_ids_and_text_agree(start):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with start() as s:
        by_chat = await answer(s, chat=chat)
        ids = list(by_chat[0].prompt_ids)
        by_text = await answer(s, prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        by_ids = await answer(s, prompt_ids={"ids": ids})
    assert ids == [256, *b"user\nhi", 257, 10, 256, *b"assistant\n"]
    assert list(by_text[0].prompt_ids) == ids == list(by_ids[0].prompt_ids)


async def test_resuming_sends_nothing_again(start, core):
    core.script = saying("a👍b")
    held = [*b"a", *"👍".encode()[:2]]
    async with start() as s:
        pieces = await answer(s, prompt="hi", resume_output_ids=held)
        complete = await answer(s, prompt="hi", resume_output_ids=[*b"a", END])
    assert "".join(piece.text for piece in pieces) == "👍b"
    assert pieces[0].first_index == 3
    assert pieces[-1].usage.completion_tokens == 7
    assert core.of(Submit)[0].request.output_ids == tuple(held)
    assert core.of(End) == [End(core.of(Submit)[0].request.request_id, 7)]
    assert [(p.text, list(p.token_ids), p.finish_reason) for p in complete] == [("", [], 1)]
    assert len(core.of(Submit)) == 1


async def test_every_error_has_its_status_and_details_as_over_http(start, core):
    errors = [
        InvalidRequest("x: bad", field="x"),
        ModelNotFound("model: no", field="model"),
        QueueFull("full", retry_after_s=1.5),
        ServiceUnavailable("none", retry_after_s=2),
        RequestCancelled("stopped"),
        DeadlineExceeded("late"),
        WorkerFailure("broken"),
    ]
    async with start() as s:
        for error in errors:
            core.script = failing(error)
            code, message, details = await refusal(s, prompt="hi")
            http = await s.http.post("/v1/completions", json={"prompt": "hi"})
            assert (code, http.status_code) == (error.grpc_status, error.http_status)
            described = http.json()["error"]
            assert message == described["message"] == error.message
            assert details["ErrorInfo"].reason == described["code"] == error.reason
            fields = (
                [v.field for v in details["BadRequest"].field_violations]
                if ("BadRequest" in details)
                else [None]
            )
            assert fields == [described["param"]] == [error.field]
            if error.retry_after_s is None:
                assert "RetryInfo" not in details
                assert "retry-after" not in http.headers
            else:
                delay = details["RetryInfo"].retry_delay.ToMilliseconds() / 1000
                assert delay == error.retry_after_s <= float(http.headers["retry-after"])


BAD_INPUT: list = [
    ({"prompt": ""}, {"prompt": ""}),
    ({}, {}),
    ({"prompt_ids": {"ids": []}}, {"prompt": []}),
    ({"prompt_ids": {"ids": [5, 300]}}, {"prompt": [5, 300]}),
    ({"prompt": "x" * 300}, {"prompt": "x" * 300}),
    ({"prompt": "x", "model": "y"}, {"prompt": "x", "model": "y"}),
    (
        {"prompt": "x", "sampling": {"temperature": -1}},
        {"prompt": "x", "temperature": -1.0},
    ),
    (
        {"prompt": "x", "sampling": {"max_tokens": 0}},
        {"prompt": "x", "max_tokens": 0},
    ),
    (
        {"prompt": "x", "sampling": {"max_tokens": 256}},
        {"prompt": "x", "max_tokens": 256},
    ),
    (
        {"prompt": "x", "sampling": {"stop_token_ids": [300]}},
        {"prompt": "x", "stop_token_ids": [300]},
    ),
    (
        {"prompt": "x", "sampling": {"top_k": 5}},
        {"prompt": "x", "top_k": 5},
    ),
    (
        {"prompt": "x", "sampling": {"stop": ["a"]}},
        {"prompt": "x", "stop": ["a"]},
    ),
    (
        {"prompt": "x", "sampling": {"n": 2}},
        {"prompt": "x", "n": 2},
    ),
    (
        {"prompt": "x", "cache_salt": "s"},
        {"prompt": "x", "cache_salt": "s"},
    ),
]


async def test_both_protocols_say_the_same_of_bad_input(start, core):
    async with start() as s:
        for grpc_fields, http_body in BAD_INPUT:
            code, message, details = await refusal(s, **grpc_fields)
            http = await s.http.post("/v1/completions", json=http_body)
            described = http.json()["error"]
            assert message == described["message"]
            assert details["BadRequest"].field_violations[0].field == described["param"]
            assert (code, http.status_code) in (("INVALID_ARGUMENT", 400), ("NOT_FOUND", 404))
    assert core.of(Submit) == []


async def test_nan_temperature_is_refused_by_name(start, core):
    async with start() as s:
        code, message, details = await refusal(
            s, prompt="hi", sampling={"temperature": float("nan")}
        )
        assert core.of(Submit) == []
        assert (await answer(s, prompt="hi"))[-1].finish_reason == 1
    assert code == "INVALID_ARGUMENT"
    assert message.startswith("temperature: nan is not between 0 and 100")
    assert details["BadRequest"].field_violations[0].field == "temperature"


async def test_cancelling_a_call_or_by_name_reaches_the_core(start, core):
    core.interval_s = 0.01
    core.script = saying("x" * 200)
    async with start() as s:
        call = inference(s).Generate(Generate(prompt="hi"))
        await call.read()
        call.cancel()
        await until(lambda: len(core.of(Cancel)) == 1)
        await until(lambda: s.intake.running_count == 0)

        named = inference(s).Generate(Generate(prompt="hi", request_id="mine"))
        await named.read()
        found = await inference(s).Cancel(inference_pb2.CancelRequest(request_id="mine"))
        unknown = await inference(s).Cancel(inference_pb2.CancelRequest(request_id="other"))
        assert await named.code() == grpc.StatusCode.CANCELLED
    assert (found.found, unknown.found) == (True, False)
    assert core.of(End) == []
    assert len(core.of(Cancel)) == 2


async def test_a_message_that_cannot_be_read_ends_only_its_own_call(start, core):
    async with start() as s:
        method = s.channel.unary_stream("/polychip.v1.InferenceService/Generate")
        for raw in (b"\xff\xff\xff", b"\x1a\x02\xff\xfe"):
            call = method(raw)
            assert await call.code() != grpc.StatusCode.OK
        assert core.of(Submit) == []
        assert (await answer(s, prompt="hi"))[-1].finish_reason == 1


async def test_an_id_in_use_is_refused(start, core):
    core.script = lambda _: []
    async with start() as s:
        call = inference(s).Generate(Generate(prompt="hi", request_id="mine"))
        await until(lambda: core.of(Submit) != [])
        code, message, _ = await refusal(s, prompt="hi", request_id="mine")
        call.cancel()
        await until(lambda: s.intake.running_count == 0)
    assert (code, "request_id" in message) == ("INVALID_ARGUMENT", True)
    assert len(core.of(Submit)) == 1


async def test_a_deadline_travels_with_the_request_and_ends_it(start, core):
    core.script = lambda _: []
    async with start() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in inference(s).Generate(Generate(prompt="hi"), timeout=0.3):
                pass
        await until(lambda: core.of(Cancel) != [])
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1000 < core.last_request.deadline <= 1000.3


async def test_a_failure_in_mid_stream_is_the_status_after_the_pieces(start, core):
    core.script = failing(WorkerFailure("chip lost"), after="abc")
    async with start() as s:
        pieces = []

        async def read() -> None:
            async for piece in inference(s).Generate(Generate(prompt="hi")):
                pieces.append(piece)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
    assert "".join(piece.text for piece in pieces) == "abc"
    assert caught.value.code() == grpc.StatusCode.INTERNAL


async def test_a_reader_that_stalls_is_cancelled(start, core, tiny_model):
    # Five bytes a token on the wire: the buffers of both sides are full after some millions.
    many = 50_000
    core.script = lambda request: [delta(request, i * many, [255] * many) for i in range(100)]
    core.tokens_max = 10**9
    endless = replace(tiny_model, context_tokens=10**9)
    async with start(endless, stream_buffer_stall_s=0.3) as s:
        call = inference(s).Generate(Generate(prompt="hi"))
        await call.read()
        await until(lambda: core.of(Cancel) != [])
        await until(lambda: s.intake.running_count == 0)
        call.cancel()


async def test_health_follows_the_serving_groups_and_draining(start):
    async with start() as s:
        stub = health_pb2_grpc.HealthStub(s.channel)

        async def states():
            names = ("", "polychip.v1.InferenceService")
            asked = [
                await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names
            ]
            assert asked[0].status == asked[1].status
            return asked[0].status

        async def becomes(state):
            with anyio.fail_after(2):
                while await states() != state:  # noqa: ASYNC110 - a client can only ask
                    await anyio.sleep(0.01)

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        s.intake.deliver(ServingChanged(()))
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        s.intake.deliver(ServingChanged(("g1",)))
        await becomes(health_pb2.HealthCheckResponse.SERVING)
        s.intake.refuse_new("draining")
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_model_info_and_reflection(start):
    async with start(debug_api=True) as s:
        info = await inference(s).GetModelInfo(inference_pb2.GetModelInfoRequest())
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        names = [
            service.name
            async for response in stub.ServerReflectionInfo(iter([asked]))
            for service in response.list_services_response.service
        ]
    assert list(info.names) == ["tiny", "default"]
    assert (info.context_tokens, info.vocabulary_size) == (256, 300)
    assert list(info.end_token_ids) == [257, 258]
    assert info.has_chat_template
    assert "polychip.v1.InferenceService" in names
    assert "polychip.v1.AdminService" in names


async def test_a_port_in_use_is_refused_by_name(start, core, tiny_model):
    async with start() as s:
        for setting, port in (("http_port", s.http_port), ("grpc_port", s.grpc_port)):
            config = ControlPlaneConfig(
                model_path="x", **({"http_port": 0, "grpc_port": 0} | {setting: port})
            )
            second = Intake(config, tiny_model, core.post, core.snapshot, lambda: 0.0)
            async with anyio.create_task_group() as tasks:
                with pytest.raises(ConfigurationError, match=setting.replace("_", " ")):
                    await second.start(tasks)
                await second.stop()


# ---------------------------------------------------------------- administration


async def test_status_shows_the_core_and_the_intake(start, core):
    core.script = lambda _: []
    async with start() as s:
        call = inference(s).Generate(Generate(prompt="hi"))
        await until(lambda: core.of(Submit) != [])
        status = await admin(s).GetStatus(admin_pb2.GetStatusRequest())
        call.cancel()
        await until(lambda: s.intake.running_count == 0)
        rest = await admin(s).GetStatus(admin_pb2.GetStatusRequest())
    worker, group = status.workers[0], status.groups[0]
    assert (worker.id, worker.pid, worker.group, worker.state) == ("chip0", 4, "g0", "serving")
    assert (worker.incarnation, worker.heartbeat_age_s, worker.backend) == (5, 0.25, "cpu")
    assert (group.id, group.epoch, list(group.ranks), group.steps) == ("g0", 3, ["chip0"], 9)
    blocks = group.blocks
    assert (blocks.free, blocks.cached, blocks.referenced, blocks.total) == (1, 2, 3, 6)
    tables = status.requests
    assert (tables.intake, tables.scheduling, tables.waiting, tables.running) == (1, 7, 2, 1)
    assert (tables.steps_in_flight, status.generated_tokens, status.failovers) == (2, 99, 6)
    assert (status.term, rest.requests.intake) == (12, 0)
    assert status.version


async def test_flush_and_verdicts(start):
    async with start() as s:
        flushed = await admin(s).FlushCache(admin_pb2.FlushCacheRequest())
        watch = admin(s).WatchVerdicts(admin_pb2.WatchVerdictsRequest())
        read = None
        async with anyio.create_task_group() as tasks:

            async def listen() -> None:
                nonlocal read
                read = await watch.read()

            tasks.start_soon(listen)
            with anyio.fail_after(3):
                while read is None:
                    s.intake.publish_verdict(Condemn("chip1", 77, 4242, "no heartbeat"))
                    await anyio.sleep(0.02)
    assert flushed.blocks_freed == 41
    assert (read.worker_id, read.incarnation, read.pid) == ("chip1", 77, 4242)
    assert read.reason == "no heartbeat"


async def test_debug_logits(start, core):
    raw = struct.pack("<3f", 1.5, -2.0, 0.25)
    core.script = lambda request: [delta(request, 0, [END], logits=raw)]
    async with start(debug_api=True) as s:
        found = await admin(s).DebugLogits(
            admin_pb2.DebugLogitsRequest(token_ids=[1, 2], group="g0")
        )
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await admin(s).DebugLogits(admin_pb2.DebugLogitsRequest(token_ids=[1], group="g7"))
        with pytest.raises(grpc.aio.AioRpcError) as empty:
            await admin(s).DebugLogits(admin_pb2.DebugLogitsRequest())
    request = core.last_request
    assert (list(found.logits), found.group) == ([1.5, -2.0, 0.25], "g1")
    assert (request.wants_logits, request.target_group, request.max_tokens) == (True, "g0", 1)
    assert request.sampling.temperature == 0
    assert details_of(unknown.value)[0] == details_of(empty.value)[0] == "INVALID_ARGUMENT"


async def test_debug_logits_is_off_by_default(start):
    async with start() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin(s).DebugLogits(admin_pb2.DebugLogitsRequest(token_ids=[1]))
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "--debug-api" in caught.value.details()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_stream", "polychip.v1.InferenceService/Generate"),
        ("unary_unary", "polychip.v1.InferenceService/Cancel"),
        ("unary_unary", "polychip.v1.AdminService/GetStatus"),
        ("unary_stream", "grpc.health.v1.Health/Watch"),
        ("stream_stream", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_bytes_that_are_no_message_are_the_clients_fault(start, caplog, kind, method):
    async with start() as s:
        sent = iter([b"\xff\xff"]) if kind == "stream_stream" else b"\xff\xff"
        call = getattr(s.channel, kind)(f"/{method}")(sent)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "2 bytes are no message" in await call.details()
        assert (await answer(s, prompt="hi"))[-1].finish_reason
    assert not [record for record in caplog.records if record.exc_info]
