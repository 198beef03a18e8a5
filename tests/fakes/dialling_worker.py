"""A worker that says what the test tells it to say, over real gRPC, from the test's event loop."""

import asyncio

import grpc

from control_plane.dispatch.wire import PROTOCOL_VERSION
from protos import worker_pb2, worker_pb2_grpc

PATIENCE_S = 5.0


class DiallingWorker:
    """One process of a worker as the control plane sees it."""

    def __init__(self, port: int, worker_id: str = "chip0", incarnation: int = 11) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.call = self._stub.Attach()

    def hello(self, **changes) -> worker_pb2.AttachRequest:
        fields = {
            "worker_id": self.worker_id,
            "incarnation": self.incarnation,
            "protocol_version": PROTOCOL_VERSION,
            "pid": 4711,
            "chip": worker_pb2.ChipInfo(backend="cpu", description="a core", dtype="float32"),
            "model": worker_pb2.ModelFingerprint(
                digest="ab", context_tokens=2048, vocabulary_size=100
            ),
            **changes,
        }
        return worker_pb2.AttachRequest(hello=worker_pb2.Hello(**fields))

    async def attach(self, **changes) -> worker_pb2.Welcome:
        await self.call.write(self.hello(**changes))
        return (await self.read()).welcome

    async def send(self, **kind) -> None:
        await self.call.write(worker_pb2.AttachRequest(**kind))

    async def read(self) -> worker_pb2.AttachResponse:
        """The next message; fails the test if the stream ends instead."""
        message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        assert message is not grpc.aio.EOF, await self.status()
        return message

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended, waited for."""
        code = await asyncio.wait_for(self.call.code(), PATIENCE_S)
        return code, await self.call.details()

    async def heartbeat(self, term: int, incarnation: int | None = None) -> bool:
        response = await self._stub.Heartbeat(
            worker_pb2.HeartbeatRequest(
                worker_id=self.worker_id,
                incarnation=incarnation or self.incarnation,
                term=term,
            ),
            timeout=PATIENCE_S,
        )
        return response.known

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()
