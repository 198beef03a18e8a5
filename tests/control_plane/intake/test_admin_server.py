"""AdminService over loopback against a scripted core, and who may call what."""

import struct

import anyio
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from control_plane.intake import admin_server
from control_plane.scheduling.messages import Condemn, Submit
from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.control_plane.intake.fake_core import END, delta, until

pytestmark = pytest.mark.anyio

Generate = inference_pb2.GenerateRequest


def inference(s):
    return inference_pb2_grpc.InferenceServiceStub(s.channel)


def admin(s):
    return admin_pb2_grpc.AdminServiceStub(s.channel)


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
    assert [(each.state, each.reason) for each in status.workers] == [
        ("serving", ""),
        ("unavailable", "burnt"),
    ]
    assert (worker.id, worker.pid, worker.group, worker.state) == ("chip0", 4, "g0", "serving")
    assert worker.blocks == 6
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
    assert {unknown.value.code(), empty.value.code()} == {grpc.StatusCode.INVALID_ARGUMENT}


async def test_no_object_is_made_of_ids_far_too_many(start, core, monkeypatch):
    def never(*_):
        raise AssertionError("a tuple was made of them")

    monkeypatch.setattr(admin_server, "TokenPrompt", never)
    async with start(debug_api=True) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin(s).DebugLogits(admin_pb2.DebugLogitsRequest(token_ids=[5] * 500_000))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("prompt: 500000 tokens leave no room")
    assert core.of(Submit) == []


async def test_debug_logits_is_off_by_default(start):
    async with start() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin(s).DebugLogits(admin_pb2.DebugLogitsRequest(token_ids=[1]))
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "--debug-api" in caught.value.details()


# ---------------------------------------------------------------- API keys

CALLS = [
    ("unary_stream", "InferenceService/Generate", Generate(prompt="hi")),
    ("unary_unary", "InferenceService/Cancel", inference_pb2.CancelRequest()),
    ("unary_unary", "InferenceService/GetModelInfo", inference_pb2.GetModelInfoRequest()),
    ("unary_unary", "AdminService/GetStatus", admin_pb2.GetStatusRequest()),
    ("unary_unary", "AdminService/FlushCache", admin_pb2.FlushCacheRequest()),
    ("unary_unary", "AdminService/DebugLogits", admin_pb2.DebugLogitsRequest(token_ids=[1])),
    ("unary_stream", "AdminService/WatchVerdicts", admin_pb2.WatchVerdictsRequest()),
]


@pytest.mark.parametrize(("kind", "method", "message"), CALLS, ids=[call[1] for call in CALLS])
async def test_a_key_is_asked_for(start, core, kind, method, message):
    async with start(api_keys=("secret", "other")) as s:
        call = getattr(s.channel, kind)(f"/polychip.v1.{method}")
        for metadata in (
            None,
            (("authorization", "secret"),),
            (("authorization", "Bearer wrong"),),
            (("authorization", "Bearer secretother"),),
        ):
            refused = call(message.SerializeToString(), metadata=metadata)
            assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED
        status = await rpc_status.aio.from_call(refused)
        info = error_details_pb2.ErrorInfo()
        assert any(packed.Unpack(info) for packed in status.details)
        assert info.reason == "INVALID_API_KEY"
        assert "secret" not in await refused.details()
        http = await s.http.get("/v1/models")
        missing = call(message.SerializeToString())
        assert await missing.details() == http.json()["error"]["message"]
    assert core.of(Submit) == []


async def test_any_of_the_keys_opens_and_health_is_open(start):
    async with start(api_keys=("secret", "other")) as s:
        for key in ("secret", "other"):
            metadata = (("authorization", f"Bearer {key}"),)
            info = await inference(s).GetModelInfo(
                inference_pb2.GetModelInfoRequest(), metadata=metadata
            )
            assert list(info.names) == ["tiny", "default"]
            call = inference(s).Generate(Generate(prompt="hi"), metadata=metadata)
            assert [piece async for piece in call][-1].finish_reason
        checked = await health_pb2_grpc.HealthStub(s.channel).Check(health_pb2.HealthCheckRequest())
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        listed = [each async for each in stub.ServerReflectionInfo(iter([asked]))]
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    assert listed
