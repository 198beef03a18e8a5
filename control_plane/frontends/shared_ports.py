"""The two client ports, held for all frontends of a service while it runs.

control plane --binds, never listens--> port <--listen, one socket each-- frontends
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError
from control_plane.intake.front import IntakePorts


@contextmanager
def held_ports(config: ControlPlaneConfig) -> Iterator[IntakePorts]:
    """Numbers of the ports, which no other service can have until the end of the block.

    Raises ConfigurationError if a port cannot be had, or cannot be shared on this system.
    """
    if sys.platform != "linux":
        raise ConfigurationError(
            f"frontends is {config.frontends}: only Linux spreads the connections of one port over "
            "several processes; leave --frontends out here"
        )
    with ExitStack() as stack:
        numbers = [
            stack.enter_context(_held(config.host, number, protocol)).getsockname()[1]
            for protocol, number in (("http", config.http_port), ("grpc", config.grpc_port))
        ]
        yield IntakePorts(http_port=numbers[0], grpc_port=numbers[1])


def _held(host: str, port: int, protocol: str) -> socket.socket:
    """A socket that has the port alone, but for those of ours that join it.

    SO_REUSEADDR passes over connections of an earlier service that are not yet forgotten.
    SO_REUSEPORT is set only afterwards: while the port is taken it must not let us join others.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        held.close()
        raise ConfigurationError(
            f"{protocol} port {port} on {host} cannot be opened: {error.strerror}; choose another "
            f"with --{protocol}-port, or 0 for any free one"
        ) from error
    return held
