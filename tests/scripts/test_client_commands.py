"""The client commands: the key they send, what they say without one; help of every command."""

import os
from typing import Any

import pytest
from click.testing import CliRunner

from scripts.child_process import quiet_grpc
from scripts.cli import common
from scripts.cli.main import main
from scripts.client import PolychipClient, ServiceRefused

COMMANDS: list[list[str]] = [["chat", "hello"], ["status", "--json"], ["cache", "flush"]]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The key of each client that is made; the service refuses all of them."""
    used: list[str | None] = []

    class Refused(PolychipClient):
        def __init__(self, host: str, grpc_port: int, api_key: str | None = None) -> None:
            super().__init__(host, grpc_port, api_key)
            used.append(api_key)

        def refuse(self, *_: object, **__: object) -> Any:
            raise ServiceRefused("authorization: not known here", "UNAUTHENTICATED")

        generate = status = flush_cache = refuse

    monkeypatch.setattr(common, "PolychipClient", Refused)
    monkeypatch.delenv("POLYCHIP_API_KEY", raising=False)
    return used


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_key_comes_from_option_or_environment(
    keys: list[str | None], command: list[str]
) -> None:
    with_option = CliRunner().invoke(main, [*command, "--api-key", "mine"])
    runner = CliRunner(env={"POLYCHIP_API_KEY": "ours"})
    runner.invoke(main, command)
    runner.invoke(main, [*command, "--api-key", "mine"])
    without = CliRunner(env={"POLYCHIP_API_KEY": ""}).invoke(main, command)
    assert keys == ["mine", "ours", "mine", None]
    assert with_option.exit_code == without.exit_code == 1
    assert "check --api-key" in with_option.output
    assert "give one with --api-key or POLYCHIP_API_KEY" in without.output
    assert "mine" not in with_option.output


@pytest.mark.parametrize("key", ["two words", "schlüssel", "line\nbreak", ""])
def test_a_key_that_cannot_be_sent_is_wrong_usage(keys: list[str | None], key: str) -> None:
    result = CliRunner().invoke(main, ["status", "--api-key", key])
    assert result.exit_code == 2
    assert "--api-key" in result.output
    assert keys == []


@pytest.mark.parametrize(
    ("command", "module"), [("worker", "chip_worker"), ("control-plane", "control_plane")]
)
def test_the_single_processes_know_the_short_help(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(
        os, "execve", lambda _, argv, environment: started.append((argv, environment))
    )
    CliRunner(env={"GRPC_VERBOSITY": None}).invoke(main, [command, "-h"])
    CliRunner().invoke(main, [command, "--model", "path"])
    (help_command, environment), (other_command, _) = started
    assert help_command[1:] == ["-m", module, "--help"]
    assert other_command[1:] == ["-m", module, "--model", "path"]
    assert environment["GRPC_VERBOSITY"] == "NONE"


def test_a_verbosity_of_grpc_that_was_asked_for_stays() -> None:
    assert quiet_grpc({"GRPC_VERBOSITY": "debug"}) == {"GRPC_VERBOSITY": "debug"}
    assert quiet_grpc({"A": "b"}) == {"A": "b", "GRPC_VERBOSITY": "NONE"}
