"""SH01: SIGTERM drops running requests, or they stall since what delivers them has stopped.

Here the service refuses new requests from the signal on and finishes what runs; what is not done in
the drain window ends with an error; a second signal means now. A worker that is told to go hands
its requests over to another group.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.end_to_end.cluster import Cluster
from tests.end_to_end.generation import Client
from tests.fakes.field_models import Chain, FieldModel
from tests.field.answers import Refused
from tests.field.calls import OpenCall, open_call, wait_until
from tests.field.field_cluster import PROTOCOLS, ClusterSpec, FieldCluster, FieldClusters
from tests.field.processes import control_plane_pid, is_running

pytestmark = pytest.mark.end_to_end

MODEL = FieldModel(Chain(), context=2048)
ROOM = ("--context", "2048", "--kv-blocks", "512")
PAIR = ClusterSpec(MODEL, ("--groups", "1,1", *ROOM))
SHORT_WINDOW = ClusterSpec(MODEL, (*ROOM, "--drain-deadline", "1"))
LONG_WINDOW = ClusterSpec(MODEL, (*ROOM, "--drain-deadline", "60"))
STREAMS = 4
HALF_WAY = 40
MIDDLE_TOKENS = 500
LONG_TOKENS = 2000
"""More than fit into a window of a second."""
EXIT_S = 15.0
"""Of a process that has nothing left to wait for; it includes workers that finish their step."""
HURRIED_EXIT_S = 8.0
AT_ONCE_S = 2.0


@contextmanager
def own_cluster(
    clusters: FieldClusters, spec: ClusterSpec, *, killed: bool = False
) -> Iterator[FieldCluster]:
    """A service of this test alone; it must exit with 0, unless it is `killed`."""
    clusters.close()
    cluster = Cluster(*clusters.options(spec))
    cluster.start()
    client = Client(cluster.grpc)
    field = FieldCluster(spec, cluster, client)
    try:
        client.wait_until_serving(60)
        yield field
        if not killed:
            cluster.stop()
    finally:
        cluster.kill()
        field.close()
        client.close()


class Streams:
    """Some of each streaming protocol, half way."""

    def __init__(self, field: FieldCluster, tokens_count: int) -> None:
        self.field, self.tokens_count = field, tokens_count
        protocols = cycle(("grpc", "http-stream"))
        self.calls: list[OpenCall] = [
            open_call(
                field, next(protocols), self.prompt(i), max_tokens=tokens_count, ignore_eos=True
            )
            for i in range(STREAMS)
        ]
        for call in self.calls:
            call.wait_for_tokens(HALF_WAY)

    def prompt(self, index: int) -> str:
        return f"the quick brown fox {index}"

    def check_whole(self) -> None:
        """Each is what its script says."""
        for index, call in enumerate(self.calls):
            answer = call.answer()
            last_id = self.field.ids_of(self.prompt(index))[-1]
            assert answer.ids == self.field.script(last_id, self.tokens_count)
            assert answer.finish == "length"

    def check_failed(self, reason: str | None) -> None:
        """Each ended early with an error; reason: None where nobody was left to tell it."""
        for call in self.calls:
            assert call.tokens_count < self.tokens_count, "it was over before"
            with pytest.raises(Exception) as caught:  # noqa: PT011 - a broken connection is one too
                call.answer()
            if reason is not None:
                assert isinstance(caught.value, Refused), caught.value
                assert caught.value.reason == reason


def grpc_health(field: FieldCluster) -> int:
    stub = health_pb2_grpc.HealthStub(field.client.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)


def check_refuses(field: FieldCluster) -> None:
    """Not ready on either protocol, and new requests are told so."""
    wait_until(lambda: field.http.get("/health").status_code == 503, "not ready", AT_ONCE_S)
    assert grpc_health(field) == health_pb2.HealthCheckResponse.NOT_SERVING
    for protocol in PROTOCOLS:
        with pytest.raises(Refused) as caught:
            field.ask(protocol, "the", max_tokens=1)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert caught.value.reason == "UNAVAILABLE"
    body = {"prompt": "the", "max_tokens": 1}
    assert float(field.http.post("/v1/completions", json=body).headers["retry-after"]) > 0


def check_ports_closed(field: FieldCluster) -> None:
    for address in (field.cluster.grpc, httpx.URL(field.cluster.http).netloc.decode()):
        host, port = address.split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)


def wait_for_exit(field: FieldCluster, deadline_s: float) -> None:
    wait_until(lambda: not field.cluster.alive(), "the service ends", deadline_s)


def test_streams_outlive_a_worker_and_then_the_readiness(field_clusters: FieldClusters) -> None:
    with own_cluster(field_clusters, PAIR) as field:
        # A worker is told to go: what it computed goes on in the other group.
        streams = Streams(field, MIDDLE_TOKENS)
        busiest = max(field.status().groups, key=lambda group: group.running)
        pid = field.worker_pids()[busiest.ranks[0]]
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_running(pid), "the worker leaves", EXIT_S)
        assert field.http.get("/health").status_code == 200
        streams.check_whole()
        assert sum(call.answer().failovers for call in streams.calls) >= 1
        wait_until(lambda: "(LEFT); it is not started again" in field.cluster.output(), "its exit")
        # Then the control plane: no new requests, but those that run go on to their end.
        streams = Streams(field, MIDDLE_TOKENS)
        os.kill(control_plane_pid(field), signal.SIGTERM)
        check_refuses(field)
        assert not any(call.is_over for call in streams.calls), "they were over before the refusal"
        streams.check_whole()
        wait_for_exit(field, EXIT_S)
        check_ports_closed(field)


def test_what_is_not_done_in_the_window_ends_with_an_error(field_clusters: FieldClusters) -> None:
    with own_cluster(field_clusters, SHORT_WINDOW) as field:
        streams = Streams(field, LONG_TOKENS)
        began = time.monotonic()
        field.cluster.terminate()
        wait_for_exit(field, 1 + EXIT_S)
        assert time.monotonic() - began >= 1
        streams.check_failed("UNAVAILABLE")
        check_ports_closed(field)


def test_a_second_signal_means_now(field_clusters: FieldClusters) -> None:
    with own_cluster(field_clusters, LONG_WINDOW, killed=True) as field:
        streams = Streams(field, LONG_TOKENS)
        workers = list(field.worker_pids().values())
        field.cluster.terminate()
        check_refuses(field)
        os.kill(field.cluster.pid, signal.SIGTERM)
        wait_for_exit(field, HURRIED_EXIT_S)
        streams.check_failed(None)
        check_ports_closed(field)
        assert not any(map(is_running, workers))
