"""The limits of the control plane that `polychip serve` hands on as they are.

Their defaults are the fields' own, so that there is one place to change one.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TypeVar

import click

from control_plane.config import ControlPlaneConfig, SchedulingConfig

Command = TypeVar("Command", bound=Callable[..., object])


@dataclass(frozen=True)
class Limit:
    """An option of the control plane; `field` is where its default stands."""

    flag: str
    field: str
    help: str
    most: float | None = None

    def type_of(self, default: object) -> click.IntRange | click.FloatRange:
        """Counts begin at 1, times and parts at 0."""
        if isinstance(default, int):
            return click.IntRange(min=1)
        return click.FloatRange(min=0.0, max=self.most)


LIMITS = (
    Limit("--max-queue-tokens", "queue_tokens_max", "Most tokens that wait."),
    Limit(
        "--admission-tokens", "admission_tokens_max", "Most token ids a step sends of a request."
    ),
    Limit(
        "--oldest-prefill-share",
        "oldest_prefill_share",
        "Part of a chunk the oldest prompt gets.",
        most=1,
    ),
    Limit("--ageing", "ageing_s", "Seconds of waiting after which arrival decides the order."),
    Limit(
        "--retractions-before-reservation",
        "retractions_before_reservation",
        "Retractions after which a request returns only with all its blocks.",
    ),
    Limit("--pipeline-depth", "pipeline_depth", "Steps sent before a result returns."),
    Limit("--plan-lead", "plan_lead_s", "Seconds before the end of a step the next is planned."),
    Limit("--digest-interval", "digest_interval_steps", "Steps between checks of slot tables."),
    Limit("--heartbeat-interval", "heartbeat_interval_s", "Seconds between heartbeats."),
    Limit("--lease", "lease_s", "Seconds without an answer after which a worker gives up."),
    Limit("--heartbeat-timeout", "heartbeat_timeout_s", "Seconds of silence that lose a worker."),
    Limit(
        "--formation-heartbeat-timeout",
        "formation_heartbeat_timeout_s",
        "The same while a worker loads the model.",
    ),
    Limit("--formation-deadline", "formation_deadline_s", "Seconds a group may take to form."),
    Limit("--step-deadline", "step_deadline_s", "Seconds a step may take."),
    Limit(
        "--recovery-timeout",
        "recovery_timeout_s",
        "Seconds requests of a lost group wait for one that serves.",
    ),
    Limit("--group-deaths", "group_deaths_max", "Lost groups after which a request runs alone."),
    Limit("--own-faults", "own_faults_max", "Faults of its own that put a chip out of service."),
    Limit("--own-faults-window", "own_faults_window_s", "Seconds over which they are counted."),
    Limit(
        "--client-message-bytes", "client_message_bytes_max", "Largest gRPC message of a client."
    ),
    Limit("--worker-message-bytes", "worker_message_bytes_max", "Largest message of a worker."),
    Limit("--http-body-bytes", "http_body_bytes_max", "Largest HTTP body."),
    Limit("--drain-deadline", "drain_deadline_s", "Seconds running requests get after SIGTERM."),
    Limit(
        "--stream-stall",
        "stream_buffer_stall_s",
        "Seconds a client may leave its answer unread.",
    ),
)


def check_limits(values: Mapping[str, object]) -> None:
    """Raises ConfigurationError if limits do not fit together; `values` is by field."""
    known = {field.name for field in fields(SchedulingConfig)}
    SchedulingConfig(**{name: value for name, value in values.items() if name in known})  # type: ignore[arg-type]


def limit_options(command: Command) -> Command:
    """Adds an option for every limit."""
    defaults = {
        field.name: field.default
        for config in (ControlPlaneConfig, SchedulingConfig)
        for field in fields(config)
        if field.default is not MISSING
    }
    for limit in reversed(LIMITS):
        default = defaults[limit.field]
        command = click.option(
            limit.flag, limit.field, type=limit.type_of(default), default=default, help=limit.help
        )(command)
    return command
