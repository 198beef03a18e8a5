"""A control plane that says what the test tells it to say, over real gRPC.

On threads instead of an event loop: the worker's connection owns the only loop of the process.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from protos import worker_pb2, worker_pb2_grpc

PATIENCE_S = 5.0


@dataclass
class AttachedStream:
    """One Attach call. outgoing: messages, or a (status, details) that ends it."""

    hello: worker_pb2.Hello
    outgoing: queue.Queue = field(default_factory=queue.Queue)
    incoming: queue.Queue = field(default_factory=queue.Queue)

    def send(self, **kind) -> None:
        self.outgoing.put(worker_pb2.AttachResponse(**kind))

    def end(self, status: grpc.StatusCode, details: str = "") -> None:
        self.outgoing.put((status, details))

    def read(self, timeout_s: float = PATIENCE_S) -> worker_pb2.AttachRequest | None:
        """The next message of the worker; None if the stream ended."""
        return self.incoming.get(timeout=timeout_s)


class ScriptedControlPlane(worker_pb2_grpc.WorkerServiceServicer):
    """Welcomes every worker; `refuse_with` refuses instead. Use as a context manager."""

    def __init__(self, term: int = 1000, lease_s: float = 0.5, interval_s: float = 0.05) -> None:
        self.term = term
        self.lease_s = lease_s
        self.interval_s = interval_s
        self.refuse_with: tuple[grpc.StatusCode, str] | None = None
        self.answers_heartbeats = True
        self.knows_workers = True
        self.heartbeats: list[worker_pb2.HeartbeatRequest] = []
        self.streams: queue.Queue[AttachedStream] = queue.Queue()
        self.hellos: list[worker_pb2.Hello] = []
        self._open: list[AttachedStream] = []
        self._server = grpc.server(ThreadPoolExecutor(16))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> "ScriptedControlPlane":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open:
            stream.end(grpc.StatusCode.UNAVAILABLE)
        self._server.stop(0).wait()

    def next_stream(self, timeout_s: float = PATIENCE_S) -> AttachedStream:
        """The next worker that is welcomed."""
        return self.streams.get(timeout=timeout_s)

    def Attach(  # noqa: N802
        self, requests: Iterator[worker_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.AttachResponse]:
        stream = AttachedStream(next(requests).hello)
        self.hellos.append(stream.hello)
        if self.refuse_with is not None:
            context.abort(*self.refuse_with)
        self._open.append(stream)
        context.add_callback(lambda: stream.outgoing.put((grpc.StatusCode.OK, "")))

        def read() -> None:
            try:
                for request in requests:
                    stream.incoming.put(request)
            except grpc.RpcError:
                pass
            stream.incoming.put(None)
            stream.outgoing.put((grpc.StatusCode.OK, ""))

        readers = ThreadPoolExecutor(1)
        readers.submit(read)
        readers.shutdown(wait=False)
        yield worker_pb2.AttachResponse(
            welcome=worker_pb2.Welcome(
                term=self.term, heartbeat_interval_s=self.interval_s, lease_s=self.lease_s
            )
        )
        self.streams.put(stream)
        while True:
            message = stream.outgoing.get()
            if isinstance(message, tuple):
                if message[0] is not grpc.StatusCode.OK:
                    context.abort(*message)
                return
            yield message

    def Heartbeat(  # noqa: N802
        self, request: worker_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> worker_pb2.HeartbeatResponse:
        self.heartbeats.append(request)
        if not self.answers_heartbeats:
            context.abort(grpc.StatusCode.UNAVAILABLE, "frozen")
        return worker_pb2.HeartbeatResponse(term=self.term, known=self.knows_workers)
