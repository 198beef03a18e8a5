"""`polychip status`: what the service is doing, for people or as JSON."""

import json
from collections.abc import Mapping, Sequence

import click
from rich.console import Console
from rich.table import Table

from scripts.cli.common import Service, connected, service_options
from scripts.client import health

Row = Mapping[str, object]


@click.command()
@service_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(host: str, http_port: int, grpc_port: int, as_json: bool) -> None:
    """Shows workers, groups, blocks and requests."""
    with connected(Service(host, http_port, grpc_port)) as client:
        answer = client.status()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    console = Console()
    console.print(_health_line(host, http_port))
    console.print(_worker_table(_rows(answer["workers"])))
    console.print(_group_table(_rows(answer["groups"])))
    requests = answer["requests"]
    assert isinstance(requests, dict)
    sizes = ", ".join(f"{name} {count}" for name, count in requests.items())
    console.print(f"Requests: {sizes}. Tokens generated: {answer['generated_tokens']}.")


def _health_line(host: str, http_port: int) -> str:
    answer = health(host, http_port)
    if answer is None:
        return f"HTTP: nothing answers at {host}:{http_port}; is --http-port right?"
    code, _ = answer
    return f"Health: {'serving' if code == 200 else 'not serving'} (HTTP {code})"


def _rows(value: object) -> Sequence[Row]:
    assert isinstance(value, list)
    return value


def _worker_table(workers: Sequence[Row]) -> Table:
    table = Table("Worker", "Process", "State", "Group", "Device", title="Workers")
    for worker in workers:
        columns = ("id", "pid", "state", "group", "device")
        table.add_row(*(str(worker[column]) for column in columns))
    return table


def _group_table(groups: Sequence[Row]) -> Table:
    table = Table("Group", "State", "Epoch", "Workers", title="Groups")
    for name in ("Running", "Waiting", "Retracted", "Blocks"):
        table.add_column(name, justify="right")
    for group in groups:
        ranks, blocks = group["ranks"], group["blocks"]
        assert isinstance(ranks, list)
        assert isinstance(blocks, dict)
        facts = (group["id"], group["state"], group["epoch"], " ".join(ranks))
        counts = (group["running"], group["waiting"], group["retracted"])
        shares = (("free", "free"), ("cached", "cached"), ("referenced", "in use"))
        block_counts = "\n".join(f"{blocks[name]} {shown}" for name, shown in shares)
        table.add_row(*(str(value) for value in (*facts, *counts)), block_counts)
    return table
