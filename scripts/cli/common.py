"""What the client commands share: where the service is, the key, errors as exit statuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import click

from control_plane.intake.api_keys import is_key
from scripts.client import (
    ClientError,
    PolychipClient,
    ServiceRefused,
    ServiceUnreachable,
    health,
)

EXIT_UNREACHABLE = 3

Command = TypeVar("Command", bound=Callable[..., object])


@dataclass(frozen=True)
class Service:
    """Where a service listens, and the key it asks for, if any."""

    host: str
    http_port: int
    grpc_port: int
    api_key: str | None = None


class Unreachable(click.ClickException):
    """Nothing answers at the service's address."""

    exit_code = EXIT_UNREACHABLE


def sendable_key(text: str) -> str:
    """A key as the metadata of a call can carry it; the key is never shown."""
    if not is_key(text):
        raise click.BadParameter("a key is letters, digits and signs of ASCII, without blanks")
    return text


def service_options(command: Command) -> Command:
    """Adds --host, --http-port, --grpc-port and --api-key."""
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Host of the service."),
        click.option("--http-port", default=8000, show_default=True, help="Its HTTP port."),
        click.option("--grpc-port", default=50051, show_default=True, help="Its gRPC port."),
        click.option(
            "--api-key",
            type=sendable_key,
            metavar="KEY",
            envvar="POLYCHIP_API_KEY",
            show_envvar=True,
            help="The key, if the service asks for one.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def connected(service: Service) -> Iterator[PolychipClient]:
    """A client of the service; its errors become messages and exit statuses."""
    with PolychipClient(service.host, service.grpc_port, service.api_key) as client:
        try:
            yield client
        except ServiceUnreachable as error:
            raise Unreachable(f"{error}; {_remedy(service)}") from error
        except ServiceRefused as error:
            raise click.ClickException(f"{error}{_key_remedy(service, error)}") from error
        except ClientError as error:
            raise click.ClickException(str(error)) from error


def _key_remedy(service: Service, error: ServiceRefused) -> str:
    if error.code != "UNAUTHENTICATED":
        return ""
    do = "give one with --api-key or" if service.api_key is None else "check --api-key and"
    return f" ({do} POLYCHIP_API_KEY)"


def _remedy(service: Service) -> str:
    if health(service.host, service.http_port) is None:
        return "start a service with `polychip serve`, or name its port with --grpc-port"
    return (
        f"HTTP answers on port {service.http_port}, so the service runs with another gRPC port: "
        "name it with --grpc-port"
    )
