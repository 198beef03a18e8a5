"""`polychip cache`: steering the prefix cache."""

import json

import click

from scripts.cli.common import Service, connected, service_options


@click.group()
def cache() -> None:
    """Steers the prefix cache."""


@cache.command()
@service_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def flush(host: str, http_port: int, grpc_port: int, api_key: str | None, as_json: bool) -> None:
    """Forgets every cached block that no request uses."""
    with connected(Service(host, http_port, grpc_port, api_key)) as client:
        blocks = client.flush_cache()
    click.echo(json.dumps({"blocks_freed": blocks}) if as_json else f"{blocks} blocks freed")
