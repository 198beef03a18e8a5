"""`polychip status`: what the service is doing, for people or as JSON."""

import json
from collections.abc import Mapping, Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Table

from scripts.cli.common import Service, connected, service_options
from scripts.client import health

Row = Mapping[str, object]


@click.command()
@service_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(host: str, http_port: int, grpc_port: int, api_key: str | None, as_json: bool) -> None:
    """Shows workers, groups, blocks and requests."""
    with connected(Service(host, http_port, grpc_port, api_key)) as client:
        answer = client.status()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    console = Console(highlight=False)
    console.print(_health_line(host, http_port))
    groups = _rows(answer["groups"])
    for table in (
        _worker_table(_rows(answer["workers"])),
        _group_table(groups),
        _block_table(groups),
    ):
        console.print(table)
    for line in _unavailable(_rows(answer["workers"])):
        console.print(line, markup=False)
    frontends = [f"{each['id']} {each['state']}" for each in _rows(answer["frontends"])]
    if frontends:
        console.print(f"Frontends: {', '.join(frontends)}.")
    requests = answer["requests"]
    assert isinstance(requests, dict)
    console.print(f"Requests: {requests['running']} running, {requests['waiting']} waiting.")
    console.print(
        f"Tokens generated: {answer['generated_tokens']}. Failovers: {answer['failovers']}."
    )


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
    table = _table(
        "Workers", ("Worker", "Process", "State", "Group", "Device"), numbers=("Blocks",)
    )
    for worker in workers:
        facts = [str(worker[column]) for column in ("id", "pid", "state", "group")]
        table.add_row(*facts, _device(worker), str(worker["blocks"]))
    return table


def _device(worker: Row) -> str:
    """Its place among the chips of its make, the vendor's id where it has one, and what it is."""
    index, device_id = worker.get("chip_index", 0), worker.get("device_id")
    return f"{index} = {device_id}: {worker['device']}" if device_id else str(worker["device"])


def _unavailable(workers: Sequence[Row]) -> list[str]:
    """A line for each worker whose chip cannot be used."""
    return [
        f"{worker['id']} is unavailable: {worker['reason']}"
        for worker in workers
        if worker.get("reason")
    ]


def _group_table(groups: Sequence[Row]) -> Table:
    table = _table(
        "Groups",
        ("Group", "State", "Epoch", "Workers"),
        numbers=("Running", "Waiting", "Retracted"),
    )
    for group in groups:
        ranks = group["ranks"]
        assert isinstance(ranks, list)
        facts = (group["id"], group["state"], group["epoch"], " ".join(ranks))
        counts = (group["running"], group["waiting"], group["retracted"])
        table.add_row(*(str(value) for value in (*facts, *counts)))
    return table


def _block_table(groups: Sequence[Row]) -> Table:
    table = _table("Blocks", ("Group",), numbers=("Tokens each", "Free", "Cached", "In use"))
    for group in groups:
        blocks = group["blocks"]
        assert isinstance(blocks, dict)
        counts = (blocks["free"], blocks["cached"], blocks["referenced"])
        table.add_row(*(str(value) for value in (group["id"], group["block_tokens"], *counts)))
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table whose columns fit 80 characters; only a long list of workers breaks into lines."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in words:
        table.add_column(name, no_wrap=name not in ("Workers", "Device"), overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
