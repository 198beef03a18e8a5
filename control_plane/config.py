"""Configuration of the control plane: every limit, with its default and unit, checked together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.errors import ConfigurationError

MIB = 1 << 20
PORT_MAX = 65535

SCHEDULING_SECONDS = (
    "ageing_s",
    "plan_lead_s",
    "heartbeat_interval_s",
    "lease_s",
    "heartbeat_timeout_s",
    "formation_deadline_s",
    "formation_heartbeat_timeout_s",
    "step_deadline_s",
    "recovery_timeout_s",
    "own_faults_window_s",
)


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """Limits and intervals of the scheduling core; times in seconds.

    group_sizes: tensor-parallel size of each group, in order; group i is called "g<i>".
    worker names are "chip<k>"; group i takes the next group_sizes[i] of them.
    """

    group_sizes: tuple[int, ...] = (1,)
    block_tokens: int = 16
    chunk_tokens: int = 512
    running_max: int = 32
    policy: str = "lpm"
    prefix_cache: bool = True
    context_tokens: int | None = None
    queue_requests_max: int = 1024
    queue_tokens_max: int = 1 << 22
    admission_tokens_max: int = 16384
    """Most ids of one admission in one step; the rest follows as extensions."""
    oldest_prefill_share: float = 0.25
    """Least share of a chunk the oldest unfinished prefill gets."""
    ageing_s: float = 5.0
    """A request that waited this long is taken in order of arrival whatever the policy says."""
    retractions_before_reservation: int = 4
    """After so many retractions a request is readmitted only with all its blocks reserved."""
    pipeline_depth: int = 2
    plan_lead_s: float = 0.004
    """The next step is planned this long before the running one is expected to end."""
    digest_interval_steps: int = 16
    heartbeat_interval_s: float = 0.5
    lease_s: float = 2.5
    """A worker without an answered heartbeat for this long gives up its epoch by itself."""
    heartbeat_timeout_s: float = 4.0
    formation_deadline_s: float = 120.0
    """From FormGroup to ready: loading weights, joining, warming up."""
    formation_heartbeat_timeout_s: float = 30.0
    step_deadline_s: float = 30.0
    """From the end of the step before (or from sending) to the result."""
    recovery_timeout_s: float = 180.0
    """How long requests of a lost group wait for any group to serve them."""
    group_deaths_max: int = 2
    """A request present at so many group deaths is replayed alone."""
    own_faults_max: int = 3
    own_faults_window_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises ConfigurationError naming the settings that do not fit together."""
        for name in (
            "block_tokens",
            "chunk_tokens",
            "running_max",
            "queue_requests_max",
            "queue_tokens_max",
            "admission_tokens_max",
            "pipeline_depth",
            "digest_interval_steps",
            "group_deaths_max",
            "own_faults_max",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        _require_seconds(self, SCHEDULING_SECONDS)
        if not 0 <= self.oldest_prefill_share <= 1:
            raise ConfigurationError(
                f"oldest_prefill_share is {self.oldest_prefill_share}; it must be from 0 to 1"
            )
        if self.context_tokens is not None and self.context_tokens < 2:
            raise ConfigurationError(
                f"context_tokens is {self.context_tokens}; one of prompt and one of output are "
                f"the least: give 2 or more, or leave it out for what the model allows"
            )
        if not self.group_sizes or min(self.group_sizes) < 1:
            raise ConfigurationError(f"groups {self.group_sizes}: every size must be at least 1")
        if self.policy not in ("lpm", "fcfs"):
            raise ConfigurationError(f"policy {self.policy!r}: choose lpm or fcfs")
        if not self.heartbeat_interval_s < self.lease_s < self.heartbeat_timeout_s:
            raise ConfigurationError(
                f"heartbeat interval {self.heartbeat_interval_s} s, lease {self.lease_s} s and "
                f"heartbeat timeout {self.heartbeat_timeout_s} s must grow in this order"
            )
        if self.formation_heartbeat_timeout_s < self.heartbeat_timeout_s:
            raise ConfigurationError(
                f"formation heartbeat timeout {self.formation_heartbeat_timeout_s} s is below the "
                f"heartbeat timeout of {self.heartbeat_timeout_s} s: give at least as much"
            )


@dataclass(frozen=True, slots=True)
class ControlPlaneConfig:
    """Configuration of the whole process.

    Ports: 0 picks a free one. message sizes in bytes, times in seconds.
    """

    model_path: str
    model_name: str = ""
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    worker_host: str = "127.0.0.1"
    worker_port: int = 50052
    kv_policy: str = "cover"
    debug_api: bool = False
    tokenizer_threads: int = 1
    client_message_bytes_max: int = 4 * MIB
    worker_message_bytes_max: int = 64 * MIB
    http_body_bytes_max: int = 4 * MIB
    drain_deadline_s: float = 30.0
    stream_buffer_stall_s: float = 30.0
    join_token: str | None = None
    announce_path: str | None = None
    """A file that receives the ports as JSON once the servers listen (for the launcher)."""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def __post_init__(self) -> None:
        """Raises ConfigurationError naming the setting that cannot be."""
        for name in ("http_port", "grpc_port", "worker_port"):
            if not 0 <= getattr(self, name) <= PORT_MAX:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}; give 1 to {PORT_MAX}, or 0 for a free one"
                )
        for name in (
            "tokenizer_threads",
            "client_message_bytes_max",
            "worker_message_bytes_max",
            "http_body_bytes_max",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        _require_seconds(self, ("drain_deadline_s", "stream_buffer_stall_s"))


def _require_seconds(config: object, names: Sequence[str]) -> None:
    for name in names:
        seconds = getattr(config, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ConfigurationError(
                f"{name} is {seconds}; it must be a number of seconds, not below 0"
            )
