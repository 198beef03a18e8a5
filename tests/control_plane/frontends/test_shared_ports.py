"""The client ports of a service with frontends: its own, to be shared by its frontends only."""

import socket

import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError
from control_plane.frontends.shared_ports import held_ports


def config(**settings) -> ControlPlaneConfig:
    return ControlPlaneConfig(
        **{"model_path": "", "frontends": 2, "http_port": 0, "grpc_port": 0} | settings
    )


def listener(port: int, *, reuse_port: bool) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), reuse_port=reuse_port)


def test_frontends_join_and_one_of_them_answers() -> None:
    with held_ports(config()) as ports:
        assert ports.http_port != ports.grpc_port
        with (
            listener(ports.http_port, reuse_port=True) as first,
            listener(ports.http_port, reuse_port=True),
        ):
            address = ("127.0.0.1", ports.http_port)
            for _ in range(20):
                socket.create_connection(address, timeout=10).close()
            first.close()
            # What one leaves goes to the other; the socket that holds the port takes nothing.
            for _ in range(20):
                socket.create_connection(address, timeout=10).close()


def test_others_are_kept_out() -> None:
    with held_ports(config()) as ports:
        with pytest.raises(OSError, match="in use"):
            listener(ports.http_port, reuse_port=False)
        for field in ("http_port", "grpc_port"):
            port = getattr(ports, field)
            flag = field.replace("_", "-")
            with (
                pytest.raises(ConfigurationError, match=f"{port} .* --{flag}"),
                held_ports(config(**{field: port})),
            ):
                pass
    with held_ports(config(http_port=ports.http_port)) as again:
        assert again.http_port == ports.http_port


@pytest.mark.parametrize("field", ["http_port", "grpc_port"])
@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_in_use_is_named(field: str, reuse_port: bool) -> None:
    with listener(0, reuse_port=reuse_port) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigurationError, match=f"{port} .*in use"),
            held_ports(config(**{field: port})),
        ):
            pass
