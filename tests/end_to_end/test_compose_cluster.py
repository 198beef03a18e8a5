"""The cluster in containers for real: up, the demonstration, down, on whatever Docker is here."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.topology import default_model_path

ROOT = Path(__file__).parents[2]
UP_DEADLINE_S = 1800.0  # The first build installs torch.
DEMO_DEADLINE_S = 900.0
DOWN_DEADLINE_S = 300.0
START_TIMEOUT_S = 600
PROJECT = "polychip-test"


def reason_without_docker() -> str | None:
    """Why no container can be started here; None if one can."""
    if shutil.which("docker") is None:
        return "there is no docker on PATH"
    answer = subprocess.run(
        ["docker", "info"], capture_output=True, text=True, timeout=60.0, check=False
    )
    if answer.returncode != 0:
        return f"the Docker daemon does not answer: {answer.stderr.strip()[-200:]}"
    return None if compose_command() else "there is no Compose"


def compose_command() -> list[str]:
    """Compose as it is called here; empty if there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        asks = [*command, "version"]
        if shutil.which(asks[0]) and subprocess.run(asks, capture_output=True).returncode == 0:
            return command
    return []


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class ComposeCluster:
    """`scripts/cluster` on a project and ports of the test's own, beside what else runs here."""

    def __init__(self) -> None:
        self._environment = os.environ | {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "POLYCHIP_HTTP_PORT": str(free_port()),
            "POLYCHIP_GRPC_PORT": str(free_port()),
            "POLYCHIP_START_TIMEOUT": str(START_TIMEOUT_S),
        }

    def run(self, *arguments: str, deadline_s: float) -> str:
        """What it printed; fails unless it ends with 0."""
        result = subprocess.run(
            [ROOT / "scripts" / "cluster", *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert result.returncode == 0, result.stdout
        return result.stdout


@pytest.fixture
def cluster() -> Iterator[ComposeCluster]:
    reason = reason_without_docker()
    if reason is not None:
        pytest.skip(reason)
    cluster = ComposeCluster()
    yield cluster
    cluster.run("down", "--volumes", deadline_s=DOWN_DEADLINE_S)


def containers() -> dict[str, str]:
    """Ids of the test's containers, running or not, by service."""
    listed = docker(
        "ps", "--all", "--filter", f"label=com.docker.compose.project={PROJECT}",
        "--format", '{{.Label "com.docker.compose.service"}} {{.ID}}',
    )  # fmt: skip
    return dict(line.split() for line in listed.splitlines())


def docker(*arguments: str) -> str:
    """What a docker command printed on either stream."""
    result = subprocess.run(
        ["docker", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60.0,
        check=True,
    )
    return result.stdout


@pytest.mark.long
@pytest.mark.end_to_end
def test_an_answer_outlives_its_worker_and_the_container_comes_back(
    cluster: ComposeCluster, tmp_path: Path
) -> None:
    source = default_model_path()
    assert source is not None
    # Nothing may split the path or take it apart, and nothing beside the model is to be seen.
    model = tmp_path / "it's a model.gguf"
    shutil.copy(source, model)
    tmp_path.joinpath("private").touch()
    cluster.run("up", "--model", str(model), deadline_s=UP_DEADLINE_S)
    found = containers()
    assert sorted(found) == ["chip0", "chip1", "control-plane"]
    assert docker("exec", found["chip0"], "ls", "/models").splitlines() == [model.name]
    check_compose_by_itself_starts_the_same(found)
    shown = cluster.run("demo", deadline_s=DEMO_DEADLINE_S)
    assert "FAILED" not in shown
    assert "the demo passed" in shown
    check_confined(found["chip0"])
    cluster.run("down", deadline_s=DOWN_DEADLINE_S)
    assert containers() == {}


@pytest.mark.long
@pytest.mark.end_to_end
def test_groups_over_tcp_outlive_a_rank(cluster: ComposeCluster) -> None:
    cluster.run("up", "--tensor-parallel", deadline_s=UP_DEADLINE_S)
    found = containers()
    assert sorted(found) == ["chip0", "chip1", "chip2", "chip3", "control-plane"]
    # By trying, not by being told: nobody names a kind of collectives.
    for first_rank in ("chip0", "chip2"):
        assert "gloo carries the collectives" in docker("logs", found[first_rank])
    shown = cluster.run("demo", deadline_s=DEMO_DEADLINE_S)
    assert "FAILED" not in shown
    assert "the demo passed" in shown


def check_compose_by_itself_starts_the_same(found: dict[str, str]) -> None:
    """The settings that `up` keeps are all there are: nothing is to be made anew."""
    settings = ("POLYCHIP_", "COMPOSE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    again = [*compose_command(), "--env-file", ".cluster/env", "up", "--detach"]
    subprocess.run(again, cwd=ROOT, env=clean, capture_output=True, timeout=120.0, check=True)
    assert containers() == found


def check_confined(container: str) -> None:
    """The processes are nobody in particular and can write nowhere but in /tmp."""
    assert docker("exec", container, "id", "-u").strip() != "0"
    inside = "touch /opt/polychip/x /etc/x 2>/dev/null && echo written; touch /tmp/x && echo fine"
    assert docker("exec", container, "sh", "-c", inside).split() == ["fine"]
    assert "NoNewPrivs:\t1" in docker("exec", container, "cat", "/proc/1/status")
    # The workers' network leads nowhere.
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)"
    result = subprocess.run(
        ["docker", "exec", container, "python", "-c", reach], capture_output=True, check=False
    )
    assert result.returncode != 0
