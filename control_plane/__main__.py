"""`python -m control_plane`: reads flags and files, then runs the service."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import click
import structlog

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.errors import ConfigurationError
from control_plane.intake.front import load_intake_model
from control_plane.intake.tokenizer_pool import physical_cores_count
from control_plane.logs import configure_logging
from control_plane.scheduling.core import SchedulingCore
from control_plane.service import Service

SERVICE_SETTINGS = "service.settings"

THREAD_SWITCH_S = 0.0005
"""A tokenizer thread that computes gives the event loop its turn after this long."""

PR_SET_PDEATHSIG = 1

EXIT_FAILED = 1

_log = structlog.get_logger()


@dataclass(frozen=True)
class Setting:
    """An option that goes straight into a field; its default is the field's."""

    flag: str
    field: str
    help: str


SCHEDULING_SETTINGS = (
    Setting("--block-tokens", "block_tokens", "Tokens in a block of the prefix index."),
    Setting("--chunk-tokens", "chunk_tokens", "Most prompt tokens a step computes."),
    Setting("--max-running", "running_max", "Most requests computing at once, per group."),
    Setting("--max-queue", "queue_requests_max", "Most requests waiting."),
    Setting("--max-queue-tokens", "queue_tokens_max", "Most tokens waiting."),
    Setting("--admission-tokens", "admission_tokens_max", "Most token ids sent in one admission."),
    Setting(
        "--oldest-prefill-share",
        "oldest_prefill_share",
        "Least share of a chunk the oldest unfinished prompt gets.",
    ),
    Setting("--ageing", "ageing_s", "Seconds after which a request is served in order of arrival."),
    Setting(
        "--retractions-before-reservation",
        "retractions_before_reservation",
        "Retractions after which a request is readmitted only with all its blocks.",
    ),
    Setting("--pipeline-depth", "pipeline_depth", "Steps sent before a result returns."),
    Setting("--plan-lead", "plan_lead_s", "Seconds before a step's end the next one is planned."),
    Setting("--digest-interval", "digest_interval_steps", "Steps between checks of slot tables."),
    Setting("--heartbeat-interval", "heartbeat_interval_s", "Seconds between heartbeats."),
    Setting("--lease", "lease_s", "Seconds without an answer after which a worker gives up."),
    Setting("--heartbeat-timeout", "heartbeat_timeout_s", "Seconds until a worker is lost."),
    Setting(
        "--formation-heartbeat-timeout",
        "formation_heartbeat_timeout_s",
        "The same while a worker loads the model.",
    ),
    Setting("--formation-deadline", "formation_deadline_s", "Seconds a group may take to form."),
    Setting("--step-deadline", "step_deadline_s", "Seconds a step may take."),
    Setting(
        "--recovery-timeout",
        "recovery_timeout_s",
        "Seconds the requests of a lost group wait for a group that serves.",
    ),
    Setting("--group-deaths", "group_deaths_max", "Lost groups after which a request runs alone."),
    Setting("--own-faults", "own_faults_max", "Faults of its own that take a chip out of service."),
    Setting("--own-faults-window", "own_faults_window_s", "Seconds in which they are counted."),
)

SERVICE_FIELDS = (
    Setting("--model-name", "model_name", "Name clients use; 'default' always works too."),
    Setting("--host", "host", "Address the client servers listen on."),
    Setting("--http-port", "http_port", "Port of the HTTP server; 0 picks a free one."),
    Setting("--grpc-port", "grpc_port", "Port of the gRPC server; 0 picks a free one."),
    Setting("--worker-host", "worker_host", "Address workers dial."),
    Setting("--worker-port", "worker_port", "Port workers dial; 0 picks a free one."),
    Setting("--client-message-bytes", "client_message_bytes_max", "Largest gRPC client message."),
    Setting("--worker-message-bytes", "worker_message_bytes_max", "Largest worker message."),
    Setting("--http-body-bytes", "http_body_bytes_max", "Largest HTTP body."),
    Setting("--drain-deadline", "drain_deadline_s", "Seconds running requests get after SIGTERM."),
    Setting(
        "--stream-stall",
        "stream_buffer_stall_s",
        "Seconds a client may leave its answer unread before it is cancelled.",
    ),
)


def settings_options(
    config_class: type[ControlPlaneConfig | SchedulingConfig], settings: Sequence[Setting]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds an option for each setting, with the type and default of its field."""
    defaults = {name: field.default for name, field in config_class.__dataclass_fields__.items()}

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for setting in reversed(settings):
            default = defaults[setting.field]
            command = click.option(
                setting.flag,
                setting.field,
                type=type(default),
                default=default,
                show_default=True,
                help=setting.help,
            )(command)
        return command

    return add


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
@click.option(
    "--kv-policy",
    type=click.Choice(["cover", "replicate", "shard"]),
    default="cover",
    show_default=True,
    help="Key and value heads a rank keeps.",
)
@click.option(
    "--policy",
    type=click.Choice(["lpm", "fcfs"]),
    default="lpm",
    show_default=True,
    help="Order of waiting requests: longest prefix match, or first come first served.",
)
@click.option(
    "--prefix-cache",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Reuse keys and values of common prefixes.",
)
@click.option(
    "--context", "context_tokens", type=int, help="Most tokens of a request; default the model's."
)
@click.option(
    "--tokenizer-threads", type=int, help="Default: half the physical cores, at least one."
)
@click.option("--debug-api", is_flag=True, help="Serve AdminService.DebugLogits.")
@click.option(
    "--join-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the secret workers must know.",
)
@click.option("--announce", "announce_path", help="File that receives the ports as JSON.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severity that is logged.",
)
@click.option("--exit-with-parent", is_flag=True, help="Die when the launcher dies.")
@settings_options(ControlPlaneConfig, SERVICE_FIELDS)
@settings_options(SchedulingConfig, SCHEDULING_SETTINGS)
def command(
    groups: str | None,
    chips: int | None,
    prefix_cache: str,
    join_token_file: Path | None,
    tokenizer_threads: int | None,
    log_level: str,
    exit_with_parent: bool,
    **settings: Any,  # noqa: ANN401 - one value an option above
) -> None:
    """Serve a model: take requests over HTTP and gRPC, plan steps, send them to chip workers.

    The chips of a group compute one model together; groups serve side by side. Workers join with
    `python -m chip_worker --control-plane HOST:WORKER_PORT`. SIGTERM drains, a second one stops.
    """
    if exit_with_parent:
        die_with_parent()
    scheduling_names = {setting.field for setting in SCHEDULING_SETTINGS}
    scheduling_names |= {"policy", "context_tokens"}
    scheduling = {name: settings.pop(name) for name in scheduling_names}
    configure_logging(log_level)
    try:
        config = ControlPlaneConfig(
            **settings,
            tokenizer_threads=tokenizer_threads or max(1, physical_cores_count() // 2),
            join_token=join_token_file.read_text().strip() if join_token_file else None,
            scheduling=SchedulingConfig(
                **scheduling,
                group_sizes=parse_groups(groups, chips),
                prefix_cache=prefix_cache == "on",
            ),
        )
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
    shown = asdict(config)
    shown["join_token"] = "set" if config.join_token else None
    _log.info(SERVICE_SETTINGS, **shown)
    sys.setswitchinterval(THREAD_SWITCH_S)
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
