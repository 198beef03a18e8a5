"""All that is wrong with the ports is found at once, before anything listens."""

import errno
import os
import socket
from contextlib import ExitStack

import pytest

from control_plane import ports
from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError
from control_plane.ports import check_ports

NAMES = ("http_port", "grpc_port", "worker_port")


def free(**changes) -> ControlPlaneConfig:
    return ControlPlaneConfig(**{"model_path": "m", **dict.fromkeys(NAMES, 0), **changes})


@pytest.fixture
def taken():
    """Three ports that somebody listens on, by the names of the settings."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
        yield dict(zip(NAMES, (each.getsockname()[1] for each in listening), strict=True))


def test_every_taken_port_is_named_with_its_option(taken) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_ports(free(**taken))
    for name, port in taken.items():
        assert f"--{name.replace('_', '-')} {port}" in str(refused.value)
    assert "or 0 for any free one" in str(refused.value)


def test_a_port_that_shares_itself_is_taken_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--http-port {port}: "):
            check_ports(free(http_port=port, frontends=2))


def test_what_is_free_is_left_free(taken) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    check_ports(free(grpc_port=port))
    check_ports(free(grpc_port=port))
    assert port not in taken.values()


@pytest.mark.parametrize("port", [0, 8000])
def test_an_address_of_another_machine_is_the_fault_of_the_host(taken, port) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_ports(free(host="192.0.2.1", http_port=port, worker_port=taken["worker_port"]))
    said = str(refused.value)
    assert "--host 192.0.2.1: " in said
    assert "--http-port" not in said
    assert f"--worker-port {taken['worker_port']}" in said


def test_a_kind_of_address_that_this_system_lacks_is_the_fault_of_the_host(monkeypatch) -> None:
    def lacks_ipv6(_family: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(ports.socket, "socket", lacks_ipv6)
    with pytest.raises(ConfigurationError, match="--host ::: Address family not supported"):
        check_ports(free(host="::"))


@pytest.mark.parametrize("host", ["ü..b", "ü" * 70])
def test_what_is_no_name_of_a_host_is_refused(host) -> None:
    with pytest.raises(ConfigurationError, match=f"--worker-host {host}: it is no name of a host"):
        check_ports(free(worker_host=host))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"http_port": 8100, "grpc_port": 8100}, "--http-port and --grpc-port are the same, 8100"),
        ({"grpc_port": 9, "worker_port": 9}, "--grpc-port and --worker-port are the same, 9"),
        ({"http_port": 9, "worker_port": 9, "host": "0.0.0.0"}, "--http-port and --worker-port"),
    ],
)
def test_two_servers_of_one_port_are_refused(settings, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        free(**settings)


def test_one_port_at_two_addresses_is_no_conflict() -> None:
    free(http_port=9, worker_port=9, worker_host="192.0.2.1")
