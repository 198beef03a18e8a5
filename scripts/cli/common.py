"""What the client commands share: where the service is, and how errors become exit statuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import click

from scripts.client import ClientError, PolychipClient, ServiceUnreachable, health

EXIT_UNREACHABLE = 3

Command = TypeVar("Command", bound=Callable[..., object])


@dataclass(frozen=True)
class Service:
    """Where a service listens."""

    host: str
    http_port: int
    grpc_port: int


class Unreachable(click.ClickException):
    """Nothing answers at the service's address."""

    exit_code = EXIT_UNREACHABLE


def service_options(command: Command) -> Command:
    """Adds --host, --http-port and --grpc-port."""
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Host of the service."),
        click.option("--http-port", default=8000, show_default=True, help="Its HTTP port."),
        click.option("--grpc-port", default=50051, show_default=True, help="Its gRPC port."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def connected(service: Service) -> Iterator[PolychipClient]:
    """A client of the service; its errors become messages and exit statuses."""
    with PolychipClient(service.host, service.grpc_port) as client:
        try:
            yield client
        except ServiceUnreachable as error:
            raise Unreachable(f"{error}; {_remedy(service)}") from error
        except ClientError as error:
            raise click.ClickException(str(error)) from error


def _remedy(service: Service) -> str:
    if health(service.host, service.http_port) is None:
        return "start a service with `polychip serve`, or name its port with --grpc-port"
    return (
        f"HTTP answers on port {service.http_port}, so the service runs with another gRPC port: "
        "name it with --grpc-port"
    )
