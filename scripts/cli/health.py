"""`polychip health`: whether the service on this machine serves, told by the exit status.

For those who ask every few seconds, such as containers: it imports next to nothing.
"""

import http.client
import sys

import click

TIMEOUT_S = 10.0
EXIT_NOT_SERVING = 1
EXIT_UNREACHABLE = 3


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the service.")
@click.option("--http-port", default=8000, show_default=True, help="Its HTTP port.")
def health(host: str, http_port: int) -> None:
    """Asks whether the service serves: exit status 0 if so, 1 if not, 3 if nothing answers."""
    connection = http.client.HTTPConnection(host, http_port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        code = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        click.echo(f"Error: nothing answers at {host}:{http_port}: {error}", err=True)
        sys.exit(EXIT_UNREACHABLE)
    finally:
        connection.close()
    serving = code == http.client.OK
    click.echo(f"{'serving' if serving else 'not serving'} (HTTP {code})")
    sys.exit(0 if serving else EXIT_NOT_SERVING)
