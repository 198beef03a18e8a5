"""Whether the ports of a configuration can be had, all of them looked at before anything starts.

Who listens later may still find a port taken: nothing holds it meanwhile.
"""

import errno
import socket
from typing import NamedTuple

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError


def check_ports(config: ControlPlaneConfig) -> None:
    """Raises ConfigurationError naming every option that asks for what cannot be had."""
    problems: list[str] = []
    taken: list[str] = []
    for flag, host, ports in (
        ("--host", config.host, {"--http-port": config.http_port, "--grpc-port": config.grpc_port}),
        ("--worker-host", config.worker_host, {"--worker-port": config.worker_port}),
    ):
        refused = _refusal(host, 0)
        if refused is not None:
            problems.append(f"{flag} {host}: {refused.why}; give an address of this machine")
            continue
        for name, port in ports.items():
            refused = _refusal(host, port)
            if refused is None:
                continue
            if refused.taken:
                taken.append(f"{name} {port}")
            else:
                problems.append(f"{name} {port} on {host}: {refused.why}; give another")
    if taken:
        problems.append(
            f"another process, maybe another service, has {', '.join(taken)}: give others, or 0 "
            "for any free one"
        )
    if problems:
        raise ConfigurationError("; ".join(problems))


class _Refusal(NamedTuple):
    why: str
    taken: bool


def _refusal(host: str, port: int) -> _Refusal | None:
    """Why a server cannot listen there.

    SO_REUSEADDR passes over connections of an earlier service that are not yet forgotten.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        return _Refusal(str(error.strerror), error.errno == errno.EADDRINUSE)
    except TypeError:  # IDNA has no form of it
        return _Refusal("it is no name of a host", taken=False)
    return None
