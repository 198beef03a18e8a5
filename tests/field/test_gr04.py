"""GR04: a second server binds the same port without an error and shares its traffic.

Here a port has one owner: a second control plane, or one on a port another program holds, exits at
once and names the port and the option, and the first one goes on alone. Workers have no port.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.end_to_end.cluster import ROOT
from tests.fakes.field_models import FieldModel
from tests.field.field_cluster import FieldClusters, together

pytestmark = pytest.mark.end_to_end

PORTS = ("http", "grpc", "worker")
START_S = 90.0
"""Python and gRPC start on a busy machine; nothing is loaded before the ports are had."""
CALLS = 100


@dataclass
class ControlPlane:
    """One that listens. ports: by http, grpc, worker."""

    process: subprocess.Popen[str]
    ports: dict[str, int]

    def check_answers(self, count: int) -> None:
        """It alone gets all the calls: each comes on a connection of its own."""
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", self.ports["http"], timeout=30)
            connection.request("GET", "/v1/models")
            assert connection.getresponse().status == 200
            connection.close()
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(f"127.0.0.1:{self.ports['grpc']}", options) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                info = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=30)
            assert info.context_tokens
        assert self.process.poll() is None


def command_of(module: str, model: Path, ports: dict[str, int], *options: str) -> list[str]:
    command = [sys.executable, "-m", *module.split(), "--model", str(model), *options]
    for name in PORTS:
        command += [f"--{name}-port", str(ports.get(name, 0))]
    return command


@contextmanager
def control_plane(model: Path, folder: Path) -> Iterator[ControlPlane]:
    """On free ports; stopped at the end."""
    announce = folder / "announce.json"
    command = command_of("control_plane", model, {}, "--announce", str(announce))
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    try:
        until = time.monotonic() + START_S
        while not announce.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        announced = json.loads(announce.read_text())
        yield ControlPlane(process, {name: announced[f"{name}_port"] for name in PORTS})
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait()


def check_refused(command: list[str], names: tuple[str, ...], *ports: int) -> None:
    """It exits with an error that tells one of the ports and the option for another one."""
    ended = subprocess.run(
        command, cwd=ROOT, timeout=START_S, capture_output=True, text=True, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode > 0, said
    assert any(str(port) in ended.stderr for port in ports), said
    assert any(f"--{name}-port" in ended.stderr for name in names), said
    assert "Traceback" not in said


@pytest.fixture
def model(field_clusters: FieldClusters) -> Path:
    """A model's directory; no cluster runs beside these."""
    field_clusters.close()
    return field_clusters.path(FieldModel())


def test_a_second_control_plane_does_not_share_a_port(model: Path, tmp_path: Path) -> None:
    with control_plane(model, tmp_path) as first:
        tries: list[Callable[[], None]] = [
            partial(check_refused, command_of("control_plane", model, {name: port}), (name,), port)
            for name, port in first.ports.items()
        ]
        # The mistake people make: the same command twice.
        command = command_of("scripts.cli.main serve", model, first.ports)
        tries.append(partial(check_refused, command, PORTS, *first.ports.values()))
        together(*tries, lambda: first.check_answers(CALLS))
        first.check_answers(1)


def test_a_port_of_another_program_is_refused(model: Path) -> None:
    with ExitStack() as stack:
        tries = []
        for name in ("http", "grpc"):
            other = stack.enter_context(socket.socket())
            # Even of one that would share it.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            command = command_of("control_plane", model, {name: port})
            tries.append(partial(check_refused, command, (name,), port))
        together(*tries)
