"""`python -m control_plane`: reads flags and files, then runs the service."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import anyio
import click
import structlog

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError
from control_plane.full_collections import rare_full_collections
from control_plane.intake.model_files import load_intake_model
from control_plane.logs import configure_logging
from control_plane.ports import check_ports
from control_plane.processors import THREAD_SWITCH_S, tokenizer_threads_default
from control_plane.scheduling.core import SchedulingCore
from control_plane.service import Service
from control_plane.settings import (
    SETTINGS,
    config_of,
    read_api_keys,
    read_join_token,
    settings_options,
)

SERVICE_SETTINGS = "service.settings"

PR_SET_PDEATHSIG = 1

EXIT_FAILED = 1

FILE = click.Path(dir_okay=False, path_type=Path)

_log = structlog.get_logger()


def parse_groups(groups: str | None, chips: int | None) -> tuple[int, ...]:
    """`--groups 2,1` or `--chips 3` (three groups of one) as group sizes."""
    if groups is not None and chips is not None:
        raise click.UsageError("--groups and --chips exclude each other; --groups 1,1 is --chips 2")
    if groups is None:
        return (1,) * (1 if chips is None else chips)
    try:
        return tuple(int(size) for size in groups.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{groups!r}: give tensor-parallel sizes separated by commas, such as 2,1",
            param_hint="--groups",
        ) from None


@click.command(context_settings={"max_content_width": 100})
@click.option("--model", "model_path", required=True, help="GGUF file or Hugging Face directory.")
@click.option("--groups", help="Chips of each group, such as 2,1 (a group of two and one of one).")
@click.option("--chips", type=click.IntRange(min=1), help="Number of groups of one chip each.")
@click.option("--join-token-file", type=FILE, help="File with the secret that admits workers.")
@click.option("--api-key-file", type=FILE, help="File with the keys clients may use, one a line.")
@click.option("--announce", "announce_path", help="File that receives the ports as JSON.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severity that is logged, to standard error.",
)
@click.option("--exit-with-parent", is_flag=True, help="Die when the launcher dies.")
@settings_options(SETTINGS)
def command(
    groups: str | None,
    chips: int | None,
    join_token_file: Path | None,
    api_key_file: Path | None,
    log_level: str,
    exit_with_parent: bool,
    **values: object,
) -> None:
    """Serve a model: take requests over HTTP and gRPC, plan steps, send them to chip workers.

    The chips of a group compute one model together; groups serve side by side. Workers join with
    `python -m chip_worker --control-plane HOST:WORKER_PORT`. SIGTERM drains, a second one stops.
    """
    if exit_with_parent:
        die_with_parent()
    configure_logging(log_level)
    try:
        values["group_sizes"] = parse_groups(groups, chips)
        if join_token_file is not None:
            values["join_token"] = read_join_token(join_token_file)
        if api_key_file is not None:
            values["api_keys"] = read_api_keys(api_key_file)
        if not values["tokenizer_threads"]:
            processes = max(1, int(str(values["frontends"])))
            values["tokenizer_threads"] = tokenizer_threads_default(processes)
        config = config_of(values)
        ended_as_asked = run(config)
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    if not ended_as_asked:
        sys.exit(EXIT_FAILED)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux only)."""
    parent = os.getppid()
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise click.ClickException("--exit-with-parent: this system has no prctl")
    if os.getppid() != parent:
        sys.exit(EXIT_FAILED)


def run(config: ControlPlaneConfig) -> bool:
    """Runs the service to its end; False if it failed. Raises ConfigurationError."""
    check_ports(config)
    shown = asdict(config)
    shown["join_token"] = "set" if config.join_token else None
    shown["api_keys"] = len(config.api_keys)
    _log.info(SERVICE_SETTINGS, **shown)
    sys.setswitchinterval(THREAD_SWITCH_S)
    with rare_full_collections():
        return anyio.run(serve, config)


async def serve(config: ControlPlaneConfig) -> bool:
    """Reads the model's metadata, then serves."""
    service = Service(
        config,
        SchedulingCore(config.scheduling),
        load_intake_model(config),
        term=int(time.time()),
        clock=time.monotonic,
    )
    return await service.run()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits 0 after a drain, 1 on failure, 2 on bad options."""
    command.main(args=None if argv is None else list(argv), prog_name="polychip control-plane")


if __name__ == "__main__":
    main()
