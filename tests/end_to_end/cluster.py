"""Real services for tests: started on free ports, watched, stopped; logs on failure."""

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.generation import Client

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 150.0
LOG_CHARACTERS_SHOWN = 8000
ORDINARY = ("--groups", "1", "--dtype", "float32", "--chunk-tokens", "512")
"""Options of the service that most tests share."""


class Cluster:
    """One `polychip serve` with its processes; a context manager.

    http: base URL. grpc: address. Both are set once it serves. Leaving the context stops it with
    SIGTERM and fails unless it exits with 0.
    """

    def __init__(self, *options: str) -> None:
        self.options = options
        self.http = ""
        self.grpc = ""
        self.pid = 0
        self._folder = tempfile.TemporaryDirectory(prefix="polychip-test-")
        self._process: subprocess.Popen[bytes] | None = None
        self._terminated = False

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(self.logs())  # pytest shows it with the failure
        self.stop()

    def start(self) -> None:
        """Starts the service and waits until /health says 200."""
        announce = self._path("announce.json")
        command = [sys.executable, "-m", "scripts.cli.main", "serve"]
        command += ["--http-port", "0", "--grpc-port", "0", "--worker-port", "0"]
        command += ["--announce", str(announce), "--log-level", "info", *self.options]
        with self._path("stdout").open("wb") as out, self._path("stderr").open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.pid = self._process.pid
        deadline = time.monotonic() + START_DEADLINE_S
        while not announce.exists():
            self._check_alive(deadline, "no ports were announced")
            time.sleep(0.1)
        ports = json.loads(announce.read_text())
        self.http = f"http://127.0.0.1:{ports['http_port']}"
        self.grpc = f"127.0.0.1:{ports['grpc_port']}"
        # The invitation is printed once /health says 200, so that alone would not do.
        while not self._healthy() or "curl -s " not in self.output():
            self._check_alive(deadline, "the service is not healthy")
            time.sleep(0.2)

    def stop(self) -> None:
        """Stops the service; fails with its logs unless it exits with 0 in time."""
        assert self._process is not None
        if not self._terminated:
            self.terminate()
        try:
            code = self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            logs = self.logs()
            self.kill()
            raise AssertionError(f"not stopped within {STOP_DEADLINE_S} s\n{logs}") from None
        logs = self.logs()
        self._folder.cleanup()
        assert code == 0, f"exit status {code}\n{logs}"

    def terminate(self) -> None:
        """Sends SIGTERM: the service finishes what runs."""
        assert self._process is not None
        self._terminated = True
        self._process.terminate()

    def kill(self) -> None:
        """Ends the service by force; the processes under it end with it."""
        if self._process is not None and self._process.poll() is None:
            # Twice SIGTERM is "now"; the launcher then takes its children with it.
            self._process.terminate()
            time.sleep(0.5)
            self._process.terminate()
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def alive(self) -> bool:
        """True while the service's main process runs."""
        return self._process is not None and self._process.poll() is None

    def output(self) -> str:
        """What `polychip serve` has printed."""
        return self._path("stdout").read_text()

    def logs(self) -> str:
        """The last of what all processes printed."""
        errors = self._path("stderr").read_text()[-LOG_CHARACTERS_SHOWN:]
        return f"--- {' '.join(self.options)}\n{self.output()}--- logs\n{errors}"

    def errors(self) -> list[str]:
        """Lines all processes have logged as errors so far."""
        lines = self._path("stderr").read_text().splitlines()
        return [line for line in lines if '"level": "error"' in line]

    def logged(self, event: str) -> list[dict[str, object]]:
        """Records of one event that all processes have logged so far."""
        lines = self._path("stderr").read_text().splitlines()
        return [json.loads(line) for line in lines if f'"event": "{event}"' in line]

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.http}/health", timeout=5.0, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _check_alive(self, deadline: float, problem: str) -> None:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the service exited with {code}\n{self.logs()}"
        assert time.monotonic() < deadline, f"{problem} in {START_DEADLINE_S} s\n{self.logs()}"


class Clusters:
    """Clusters by their options; one serves at a time, because they share two cores."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._client: Client | None = None

    def cluster(self, *options: str) -> Cluster:
        """The cluster with these options: the running one, or a new one in its place."""
        current = self._cluster
        if current is not None and current.options == options and current.alive():
            return current
        last = self._released()
        if last is not None:
            last.terminate()  # it stops while the next one starts
        try:
            cluster = Cluster(*options)
            self._cluster = cluster.__enter__()
        finally:
            if last is not None:
                last.stop()
        return cluster

    def client(self, *options: str) -> Client:
        """A gRPC client of the cluster with these options; all its groups serve."""
        cluster = self.cluster(*options)
        if self._client is None:
            self._client = Client(cluster.grpc)
        self._client.wait_until_serving(START_DEADLINE_S)
        return self._client

    def close(self) -> None:
        """Stops the running cluster, if there is one."""
        cluster = self._released()
        if cluster is not None:
            cluster.stop()

    def _released(self) -> Cluster | None:
        """The running cluster, which is the caller's to stop."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        cluster, self._cluster = self._cluster, None
        return cluster

    def logs(self) -> str:
        """Logs of the running cluster."""
        return "" if self._cluster is None else self._cluster.logs()


@functools.cache
def shared_clusters() -> Clusters:
    """The clusters of this test run: every folder's tests share them, so that one lives at a time.

    Whoever has finished with them closes them; they may be used again after it.
    """
    return Clusters()


def add_cluster_logs(item: pytest.Item, report: pytest.TestReport) -> None:
    """Adds the running cluster's logs to the report of a failed test that uses clusters."""
    if report.failed and "clusters" in getattr(item, "fixturenames", ()):
        report.sections.append(("cluster", shared_clusters().logs()))
