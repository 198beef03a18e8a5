"""`scripts/cluster` beside a docker that only writes down what it is asked: what it does and says.

The real thing is in tests/end_to_end/test_compose_cluster.py.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = (
    *("awk", "bash", "basename", "cat", "chmod", "chown", "cp", "cut", "dirname", "find", "grep"),
    *("head", "id", "ln", "mkdir", "mkfifo", "mktemp", "mv", "od", "readlink", "rm", "sed", "sh"),
    *("sleep", "tail", "tr"),
)
FAKE_DOCKER = """#!/bin/sh
echo "docker $*" >>"$FAKE_FOLDER/asked"
if [ "$1 $2" = "compose up" ]; then
  echo "$POLYCHIP_MODELS:$POLYCHIP_MODELS_AT $POLYCHIP_MODEL" >"$FAKE_FOLDER/model"
  echo "cpus $POLYCHIP_CPUS_PER_CHIP" >>"$FAKE_FOLDER/asked"
fi
case "$1 $2 $3" in
  "info "*)
    [ -z "$FAKE_DAEMON" ] || { echo "$FAKE_DAEMON" >&2; exit 1; }
    echo "WARNING: no swap limit" >&2
    echo "8 [name=seccomp]" ;;
  "compose version "*) [ -z "$FAKE_NO_COMPOSE" ] || exit 1 ;;
  "compose build "*) echo "Step 1/2 : pip install"; exit "${FAKE_BUILD:-0}" ;;
  "image inspect "*) echo 1245000000 ;;
  "inspect --format {{.RestartCount}}")
    cat "$FAKE_FOLDER/restarts"
    [ -z "$FAKE_ENDS" ] || echo "$FAKE_ENDS" >"$FAKE_FOLDER/restarts" ;;
  "inspect --format "*State*) echo "${FAKE_STATE:-healthy}" ;;
  "inspect --format {{.Name}}") echo /polychip-control-plane-1 ;;
  "inspect --format "*) echo chip0 ;;
  "logs --tail "*) echo "the end of a log" ;;
  "exec --env POLYCHIP_API_KEY") echo "key $POLYCHIP_API_KEY" >>"$FAKE_FOLDER/asked" ;;
  "exec control-plane python") echo "crash chip1 7" ;;
  "exec chip1 sh") [ -z "$FAKE_REVIVED" ] || echo 1 >"$FAKE_FOLDER/restarts" ;;
esac
case "$*" in
  *" rm --stop "*) [ -z "$FAKE_STUCK" ] || { echo "$FAKE_STUCK" >&2; exit 1; } ;;
  *" ps -q chip2 chip3") echo "$FAKE_LEFT_OVER" ;;
  *" ps -q control-plane") [ -z "$FAKE_RUNS" ] || echo control-plane ;;
  *" ps -q chip1") echo chip1 ;;
  *" ps -q") echo "control-plane chip0" ;;
esac
"""


class Script:
    """A copy of the script in a folder of its own, beside a docker that is not one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(ROOT / "scripts" / "cluster", folder / "scripts" / "cluster")
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (folder / "bin" / tool).symlink_to(found)
        self.docker = folder / "bin" / "docker"
        self.docker.write_text(FAKE_DOCKER)
        self.docker.chmod(0o755)
        (folder / "restarts").write_text("0\n")

    def run(
        self, *arguments: str, folder: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": str(self.folder / "bin"),
            "FAKE_FOLDER": str(self.folder),
            "POLYCHIP_HTTP_PORT": str(free_port()),
            "POLYCHIP_GRPC_PORT": str(free_port()),
        }
        return subprocess.run(
            [self.folder / "scripts" / "cluster", *arguments],
            env=variables | environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )

    @property
    def asked(self) -> list[str]:
        """The command lines docker was called with."""
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["-h"], 0, "scripts/cluster demo"),
        ([], 2, "say up, demo or down"),
        (["sideways"], 2, "unknown option or command sideways"),
        (["up", "down"], 2, "one command at a time: up or down"),
        (["up", "--model"], 2, "--model needs a path"),
        (["up", "--images"], 2, "--images is an option of down, not of up"),
        (["demo", "--volumes"], 2, "--volumes is an option of down, not of demo"),
        (["down", "--model", "x"], 2, "--model is an option of up, not of down"),
        (["up", "--api-key", "x"], 2, "--api-key is an option of demo, not of up"),
    ],
    ids=str,
)
def test_what_it_is_asked_for(script: Script, arguments: list[str], code: int, says: str) -> None:
    result = script.run(*arguments)
    assert result.returncode == code
    assert says in result.stdout + result.stderr
    assert script.asked == []


def test_without_docker_it_says_what_to_install(script: Script) -> None:
    script.docker.unlink()
    result = script.run("up")
    assert result.returncode == 1
    assert "no docker on PATH; install" in result.stderr


def test_a_daemon_that_does_not_answer_is_quoted(script: Script) -> None:
    result = script.run("up", FAKE_DAEMON="permission denied on the socket")
    assert result.returncode == 1
    assert "does not answer: permission denied on the socket; start it" in result.stderr


def test_without_compose_it_says_what_to_install(script: Script) -> None:
    result = script.run("down", FAKE_NO_COMPOSE="yes")
    assert result.returncode == 1
    assert "install the Compose plugin" in result.stderr


def test_a_port_that_is_taken_is_named_with_its_setting(script: Script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = script.run("up", POLYCHIP_GRPC_PORT=port)
    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1 is taken" in result.stderr
    assert "$POLYCHIP_GRPC_PORT" in result.stderr
    assert not any("compose build" in line for line in script.asked)


def test_a_build_that_fails_shows_the_end_of_its_log_and_what_to_do(script: Script) -> None:
    result = script.run("up", FAKE_BUILD="1")
    assert result.returncode == 1
    assert "Step 1/2 : pip install" in result.stderr
    assert "PIP_INDEX_URL" in result.stderr
    assert not any(" up " in line for line in script.asked)


def test_up_makes_a_secret_for_one_user_and_says_where_it_serves(script: Script) -> None:
    result = script.run("up", POLYCHIP_HTTP_PORT="41999")
    assert result.returncode == 0, result.stderr
    token = script.folder / ".cluster" / "join-token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}", token.read_text())
    assert token.read_text() not in result.stdout + result.stderr
    assert "http://127.0.0.1:41999/v1/chat/completions" in result.stdout
    assert "docker compose up --detach --no-build" in script.asked
    # The secret of a cluster that runs stays.
    script.run("up", FAKE_RUNS="yes")
    assert (script.folder / ".cluster" / "join-token").read_text() == token.read_text()


def test_a_docker_that_warns_is_understood(script: Script) -> None:
    assert script.run("up").returncode == 0
    assert "cpus 4" in script.asked


@pytest.mark.parametrize("timeout", ["soon", "0", "1.5"])
def test_a_wait_that_is_no_number_is_refused(script: Script, timeout: str) -> None:
    result = script.run("up", POLYCHIP_START_TIMEOUT=timeout)
    assert result.returncode == 2
    assert f"POLYCHIP_START_TIMEOUT is '{timeout}'; it must be" in result.stderr
    assert script.asked == []


def test_what_it_sets_is_kept_for_compose_by_itself(script: Script) -> None:
    model = script.folder / "it's a model.gguf"
    model.touch()
    result = script.run("up", "--model", str(model), POLYCHIP_OPTIONS='--x "a $b"')
    assert result.returncode == 0, result.stderr
    path = script.folder / ".cluster" / "env"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = path.read_text().splitlines()
    assert "COMPOSE_PROJECT_NAME='polychip'" in kept
    assert "POLYCHIP_CHIPS='2'" in kept
    assert "POLYCHIP_CPUS_PER_CHIP='4'" in kept
    assert """POLYCHIP_OPTIONS='--x "a $b"'""" in kept
    assert f'POLYCHIP_MODELS="{model}"' in kept
    assert 'POLYCHIP_MODELS_AT="/models/it\'s a model.gguf"' in kept
    assert not any("PIP_" in line or "PATH" in line for line in kept)


def test_a_setting_that_no_file_can_carry_is_refused_before_anything_is_built(
    script: Script,
) -> None:
    result = script.run("up", POLYCHIP_OPTIONS="--x it's --y $z")
    assert result.returncode == 1
    assert "$POLYCHIP_OPTIONS cannot stand in .cluster/env" in result.stderr
    assert not any("build" in line for line in script.asked)


def test_what_next_shows_where_a_key_goes(script: Script) -> None:
    assert "Authorization" not in script.run("up").stdout
    result = script.run("up", POLYCHIP_OPTIONS="--api-key-file /run/keys")
    curls = [line for line in result.stdout.splitlines() if line.startswith("curl ")]
    assert ["/chat/completions" in line for line in curls] == [True, False]
    assert all('-H "Authorization: Bearer $POLYCHIP_API_KEY"' in line for line in curls)
    assert "docker exec -it --env POLYCHIP_API_KEY polychip-control-plane-1" in result.stdout


def test_the_folder_of_another_user_is_refused_with_the_remedy(script: Script) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    (script.folder / ".cluster").mkdir()
    (script.folder / ".cluster" / "join-token").write_text("x")
    os.chown(script.folder / ".cluster" / "join-token", 10001, 10001)
    (script.folder / "bin" / "id").unlink()
    (script.folder / "bin" / "id").write_text("#!/bin/sh\necho 1000\n")
    (script.folder / "bin" / "id").chmod(0o755)
    result = script.run("up")
    assert result.returncode == 1
    assert "join-token belongs to another user" in result.stderr
    assert "sudo rm -r" in result.stderr


def test_a_container_that_keeps_ending_is_not_waited_for(script: Script) -> None:
    result = script.run("up", FAKE_STATE="starting", FAKE_ENDS="9")
    assert result.returncode == 1
    assert "has ended 4 times" in result.stderr
    assert "the end of a log" in result.stderr


def test_ends_before_this_start_do_not_count(script: Script) -> None:
    (script.folder / "restarts").write_text("9\n")
    result = script.run("up", FAKE_STATE="starting", POLYCHIP_START_TIMEOUT="1")
    assert "not healthy within 1 s" in result.stderr


def test_waiting_has_an_end(script: Script) -> None:
    result = script.run("up", FAKE_STATE="starting", POLYCHIP_START_TIMEOUT="1")
    assert result.returncode == 1
    assert "not healthy within 1 s" in result.stderr


def test_a_model_that_is_not_there_is_refused_before_anything_is_built(script: Script) -> None:
    result = script.run("up", "--model", "/no/such/model")
    assert result.returncode == 1
    assert "--model /no/such/model: there is no such file" in result.stderr
    assert not any("build" in line for line in script.asked)


@pytest.mark.parametrize("target", ["../blob", "/etc/hostname"])
def test_links_that_lead_out_of_a_model_are_refused_with_the_remedy(
    script: Script, target: str
) -> None:
    (script.folder / "blob").touch()
    model = script.folder / "snapshot"
    model.mkdir()
    (model / "weights").touch()
    (model / "inside").symlink_to("weights")
    assert script.run("up", "--model", str(model)).returncode == 0
    (model / "config.json").symlink_to(target)
    result = script.run("up", "--model", str(model))
    assert result.returncode == 1
    assert "the link config.json leads out of the folder" in result.stderr
    assert f"cp -rL {model} COPY" in result.stderr


def test_a_path_that_cannot_be_mounted_is_refused(script: Script) -> None:
    (script.folder / "a:b").mkdir()
    result = script.run("up", "--model", str(script.folder / "a:b"))
    assert result.returncode == 1
    assert "Compose mounts no path with a colon" in result.stderr


def test_wheels_on_this_disk_come_along(script: Script, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "torch-2.13.0-cp311-cp311-any.whl").touch()
    (tmp_path / "disk" / "torch-2.13.0-cp310-cp310-any.whl").touch()
    script.run("up", PIP_FIND_LINKS=str(tmp_path / "disk"))
    found = [path.name for path in (script.folder / "wheels").iterdir()]
    assert found == ["torch-2.13.0-cp311-cp311-any.whl"]


def test_workers_of_a_larger_cluster_do_not_stay(script: Script) -> None:
    script.run("up", FAKE_RUNS="yes", FAKE_LEFT_OVER="abc")
    removals = [line for line in script.asked if " rm --stop --force chip2 chip3" in line]
    assert len(removals) == 1
    result = script.run("up", FAKE_RUNS="yes", FAKE_LEFT_OVER="abc", FAKE_STUCK="it is stuck")
    assert result.returncode == 1
    assert "could not be removed: it is stuck; end all with scripts/cluster down" in result.stderr


def test_down_reaches_the_workers_of_every_profile(script: Script) -> None:
    assert script.run("down", "--volumes", "--images").returncode == 0
    assert "docker compose --profile tensor-parallel down --remove-orphans --volumes" in (
        script.asked
    )
    assert "docker image rm polychip" in script.asked


def test_a_demo_needs_a_cluster(script: Script) -> None:
    result = script.run("demo")
    assert result.returncode == 1
    assert "no cluster runs; start one with scripts/cluster up" in result.stderr


def test_the_demo_crashes_from_inside_and_sees_the_container_come_back(script: Script) -> None:
    result = script.run("demo", FAKE_RUNS="yes", FAKE_REVIVED="yes")
    assert result.returncode == 0, result.stderr
    assert "docker exec chip1 sh -c kill -KILL 7" in script.asked
    assert not any(line.startswith(("docker kill", "docker stop")) for line in script.asked)
    assert "restart count 1, before 0" in result.stdout


def test_the_key_of_the_demo_reaches_the_container_unseen(script: Script) -> None:
    result = script.run("demo", "--api-key", "secret", FAKE_RUNS="yes")
    # Nothing was crashed, so nothing is said about a restart.
    assert (result.returncode, result.stdout) == (1, "")
    assert "key secret" in script.asked
    assert not any("secret" in line for line in script.asked if line.startswith("docker"))


def test_a_container_that_stays_down_fails_the_demo(script: Script) -> None:
    result = script.run("demo", FAKE_RUNS="yes")
    assert result.returncode == 1
    assert "FAILED Docker has not started a container again" in result.stdout


def test_the_image_has_the_torch_that_set_up_installs() -> None:
    wanted = re.compile(r"\$\{POLYCHIP_TORCH:-(torch==[\d.]+)\}")
    texts = [(ROOT / name).read_text() for name in ("Dockerfile", "scripts/setup")]
    versions = [wanted.findall(text) for text in texts]
    assert versions[0] == versions[1]
    assert len(versions[0]) == 1


def test_it_may_be_called_from_elsewhere(script: Script, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.gguf").touch()
    result = script.run("up", "--model", "own.gguf", folder=elsewhere)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model").read_text() == (
        f"{elsewhere}/own.gguf:/models/own.gguf /models/own.gguf\n"
    )
    assert [path.name for path in elsewhere.iterdir()] == ["own.gguf"]
