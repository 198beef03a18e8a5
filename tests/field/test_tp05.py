"""TP05: a product gives wrong logits at a large vocabulary while health says 200.

Here a chip is ready only after each of its operations gave the reference's numbers on the weights
of the model: a service with a wrong one never is, and says which operation is to blame.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from backends.interface import BackendConfig, BackendRuntime, open_runtime
from backends.plugin import Backend, find_backend
from chip_worker.batch import Fault, FaultKind, Ready
from tests.end_to_end.cluster import ROOT
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import form_command, open_rank
from tests.fakes.field_models import Chain, FieldModel
from tests.field.field_cluster import ClusterSpec, FieldCluster, FieldClusters, check_equal
from tests.field.test_lm08 import BEYOND

GOOD = BEYOND
"""Simulated chips that are right; of another scenario, which runs on the same cluster."""
TOLD_WITHIN_S = 90.0
WATCHED_S = 1.0
"""So long after the first refusal, while the worker is started again."""
ENDED_WITHIN_S = 30.0
OPERATIONS = ("attention", "logits", "sample")
FURTHER = (
    *("add_rms_norm", "adjust_logits", "embedding", "rms_norm", "rotary", "silu_mul"),
    "token_logprobs",
)


def faulty(operation: str) -> ClusterSpec:
    options = ("--backend", "sim", "--backend-option", "pace=off")
    return ClusterSpec(
        FieldModel(Chain()), (*options, "--backend-option", f"faults=wrong@{operation}")
    )


class Unready:
    """A service that does not become ready; every look at its health must say so."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.looks_count = 0

    def output(self) -> str:
        return (self._folder / "stdout").read_text()

    def look(self) -> None:
        assert self._process.poll() is None, self.output()
        announced = self._folder / "announce.json"
        if announced.exists():
            port = json.loads(announced.read_text())["http_port"]
            health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0, trust_env=False)
            assert health.status_code == 503, self.output()
            self.looks_count += 1
        time.sleep(0.1)

    def look_until_told(self, told: str) -> str:
        """The line that tells it."""
        give_up = time.monotonic() + TOLD_WITHIN_S
        while True:
            self.look()
            lines = [line for line in self.output().splitlines() if told in line]
            if lines:
                return lines[0]
            assert time.monotonic() < give_up, self.output()


@contextmanager
def started(options: tuple[str, ...], folder: Path) -> Iterator[Unready]:
    """A service, ended by SIGTERM."""
    command = [sys.executable, "-m", "scripts.cli.main", "serve"]
    command += ["--http-port", "0", "--grpc-port", "0", "--worker-port", "0"]
    command += ["--announce", str(folder / "announce.json"), *options]
    with (folder / "stdout").open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.DEVNULL)
    try:
        yield Unready(process, folder)
        process.terminate()
        assert process.wait(ENDED_WITHIN_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.end_to_end
@pytest.mark.parametrize("operation", ["logits", pytest.param("silu_mul", marks=pytest.mark.long)])
def test_a_chip_with_a_wrong_operation_never_becomes_ready(
    field_clusters: FieldClusters, tmp_path: Path, operation: str
) -> None:
    field_clusters.close()
    with started(field_clusters.options(faulty(operation)), tmp_path) as service:
        told = service.look_until_told("chip0 is unavailable:")
        assert f"computes '{operation}'" in told
        assert "wrongly at batch size" in told
        watched = time.monotonic() + WATCHED_S
        while time.monotonic() < watched:
            service.look()
        assert service.looks_count > 2
        assert "/v1/chat/completions" not in service.output(), "it invites nobody"


@pytest.mark.end_to_end
@pytest.mark.parametrize("field", [GOOD], indirect=True)
def test_a_right_chip_is_ready_and_answers_as_the_oracle(field: FieldCluster) -> None:
    assert field.http.get("/health").status_code == 200
    prompt = field.ids_of("the quick brown fox")
    expected = field.oracle(prompt, 12)
    for protocol in ("http", "grpc"):
        check_equal(field.ask(protocol, prompt, max_tokens=12, ignore_eos=True), expected)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hugging_face(tmp_path_factory.mktemp("tiny"), TinyLlama()))


def simulated(faults: str, backend: Backend, config: BackendConfig) -> BackendRuntime:
    return open_runtime(backend, replace(config, options={"pace": "off", "faults": faults}))


def formed_with(model_path: str, faults: str) -> object:
    """What a worker reports that is to form a group."""
    rank = open_rank(
        model_path, backend=find_backend("sim"), runtime_class=partial(simulated, faults)
    )
    rank.session.handle(form_command())
    rank.session.close()
    return rank.last


def test_in_one_process_a_right_chip_becomes_ready(tiny: str) -> None:
    assert isinstance(formed_with(tiny, ""), Ready)


@pytest.mark.parametrize(
    "operation",
    [*OPERATIONS, *(pytest.param(each, marks=pytest.mark.long) for each in FURTHER)],
)
def test_in_one_process_a_wrong_operation_is_named(tiny: str, operation: str) -> None:
    report = formed_with(tiny, f"wrong@{operation}")
    assert isinstance(report, Fault)
    assert report.kind is FaultKind.DEVICE
    assert f"computes '{operation}'" in report.message
