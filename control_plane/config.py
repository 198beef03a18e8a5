"""Configuration of the control plane: every limit, with its default and unit, checked together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.errors import ConfigurationError

MIB = 1 << 20
PORT_MAX = 65535
WILDCARDS = {"0.0.0.0", "::"}
"""Hosts that mean every address of this machine."""
FRONTENDS_MAX = 16
KV_POLICIES = ("cover", "replicate", "shard")
POLICIES = ("lpm", "fcfs", "shortest-prefill-first", "priority")

GRPC_MESSAGE_BYTES_MAX = (1 << 31) - 1
UINT32_MAX = (1 << 32) - 1
"""The messages to workers, frontends and admins count in such fields."""
RUNNING_MAX = 1 << 16
"""The control plane and each worker keep a row of a table for every request that may run."""
BLOCKS_MAX = 1 << 24
"""The ledger keeps a few bytes for every block of KV memory."""
SECONDS_MAX = 1_000_000_000
"""Thirty years; the clocks that wait for it take no more than some hundred."""


class Range(NamedTuple):
    """Both ends are allowed; no number is endless."""

    least: float
    most: float = math.inf


COUNT = Range(1, UINT32_MAX)
COUNT_OR_NONE = Range(0, UINT32_MAX)
BYTES = TOKENS = Range(1)
SECONDS = Range(0, SECONDS_MAX)
PORT = Range(0, PORT_MAX)
MESSAGE_BYTES = Range(1, GRPC_MESSAGE_BYTES_MAX)

SCHEDULING_RANGES = {
    "block_tokens": COUNT,
    "chunk_tokens": COUNT,
    "running_max": Range(1, RUNNING_MAX),
    "context_tokens": Range(2, UINT32_MAX),
    "queue_requests_max": COUNT,
    "queue_tokens_max": TOKENS,
    "admission_tokens_max": COUNT,
    "oldest_prefill_share": Range(0, 1),
    "decode_latency_target_ms": Range(0, 1000 * SECONDS_MAX),
    "prefill_time_share_min": Range(0, 0.9),
    "ageing_s": SECONDS,
    "retractions_before_reservation": COUNT_OR_NONE,
    "pipeline_depth": COUNT,
    "plan_lead_s": SECONDS,
    "digest_interval_steps": COUNT,
    "heartbeat_interval_s": Range(0.01, SECONDS_MAX),
    "lease_s": SECONDS,
    "heartbeat_timeout_s": SECONDS,
    "start_deadline_s": SECONDS,
    "formation_deadline_s": SECONDS,
    "probe_deadline_s": SECONDS,
    "formation_heartbeat_timeout_s": SECONDS,
    "step_deadline_s": SECONDS,
    "recovery_timeout_s": SECONDS,
    "group_deaths_max": COUNT,
    "own_faults_max": COUNT,
    "own_faults_window_s": SECONDS,
}

SERVICE_RANGES = {
    "http_port": PORT,
    "grpc_port": PORT,
    "frontends": Range(0, FRONTENDS_MAX),
    "frontend_start_deadline_s": SECONDS,
    "worker_port": PORT,
    "tokenizer_threads": COUNT,
    "client_message_bytes_max": MESSAGE_BYTES,
    "worker_message_bytes_max": MESSAGE_BYTES,
    "http_body_bytes_max": BYTES,
    "intake_bytes_max": BYTES,
    "json_values_max": COUNT,
    "body_deadline_s": Range(0.1, SECONDS_MAX),
    "choices_max": COUNT,
    "prompt_scores_max": COUNT_OR_NONE,
    "top_logprobs_max": COUNT_OR_NONE,
    "stop_strings_max": COUNT_OR_NONE,
    "stop_string_characters_max": COUNT,
    "stop_token_ids_max": COUNT_OR_NONE,
    "logit_bias_max": COUNT_OR_NONE,
    "drain_deadline_s": SECONDS,
    "stream_buffer_stall_s": SECONDS,
}


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
    decode_latency_target_ms: float = 100.0
    """A step in which somebody decodes takes at most so long, as far as its chunk decides it; with
    0 there is no target, and every chunk may be full."""
    prefill_time_share_min: float = 0.6
    """Least share of such a step's time that is left for prompts where the target leaves less."""
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
    fewer_chips: bool = True
    """A group forms without workers whose chips are unavailable, cordoned or do not come."""
    start_deadline_s: float = 120.0
    """How long a group waits for the rest once one of its workers is there."""
    formation_deadline_s: float = 120.0
    """From FormGroup to ready: loading weights, joining, warming up."""
    probe_deadline_s: float = 20.0
    """For the first collective of an epoch, whose result is known."""
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
        _check_ranges(self, SCHEDULING_RANGES)
        if not self.group_sizes or min(self.group_sizes) < 1:
            raise ConfigurationError(f"groups {self.group_sizes}: every size must be at least 1")
        if self.policy not in POLICIES:
            raise ConfigurationError(f"policy {self.policy!r}: choose one of {', '.join(POLICIES)}")
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
    frontends: int = 0
    """Processes that take requests; 0: the control plane's own does it."""
    frontend_start_deadline_s: float = 60.0
    """From the start of such a process until it takes clients: it builds a tokenizer meanwhile."""
    worker_host: str = "127.0.0.1"
    worker_port: int = 50052
    kv_policy: str = "cover"
    debug_api: bool = False
    tokenizer_threads: int = 1
    client_message_bytes_max: int = 16 * MIB
    worker_message_bytes_max: int = 64 * MIB
    http_body_bytes_max: int = 16 * MIB
    intake_bytes_max: int = 256 * MIB
    """Most bytes of requests that are being read, templated and tokenized. Those of gRPC count to
    the end of their calls: its library keeps them so long."""
    json_values_max: int = 1 << 20
    """Most values of an HTTP body; each costs time that no other request gets meanwhile."""
    body_deadline_s: float = 60.0
    """From the head of an HTTP request to the end of its body."""
    choices_max: int = 128
    """Most choices of one request: its prompts times n; see call_choices_max."""
    prompt_scores_max: int = 1 << 20
    """Most scores of the prompts of one request: tokens times one and the likeliest of each."""
    top_logprobs_max: int = 20
    stop_strings_max: int = 16
    stop_string_characters_max: int = 256
    stop_token_ids_max: int = 64
    logit_bias_max: int = 1024
    drain_deadline_s: float = 30.0
    stream_buffer_stall_s: float = 30.0
    join_token: str | None = field(default=None, repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """One of them must come with every request; none configured means that none is asked for."""
    announce_path: str | None = None
    """A file that receives the ports as JSON once the servers listen (for the launcher)."""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def __post_init__(self) -> None:
        """Raises ConfigurationError naming the setting that cannot be."""
        _check_ranges(self, SERVICE_RANGES)
        if self.kv_policy not in KV_POLICIES:
            raise ConfigurationError(
                f"kv_policy {self.kv_policy!r}: choose one of {', '.join(KV_POLICIES)}"
            )
        self._check_ports_differ()

    def _check_ports_differ(self) -> None:
        """Ports of one address; 0 is another one each time."""
        ports = {"--http-port": self.http_port, "--grpc-port": self.grpc_port}
        if self.worker_host == self.host or WILDCARDS & {self.worker_host, self.host}:
            ports["--worker-port"] = self.worker_port
        for flag, port in ports.items():
            same = [each for each, other in ports.items() if port and other == port]
            if len(same) > 1:
                raise ConfigurationError(
                    f"{' and '.join(same)} are the same, {port}: give {flag} another port"
                )

    def check_model_context(self, model_tokens: int) -> None:
        """Raises ConfigurationError for what does not fit a model of so many tokens of context."""
        block_tokens = self.scheduling.block_tokens
        if block_tokens > model_tokens:
            raise ConfigurationError(
                f"block_tokens is {block_tokens}, but the model has a context of {model_tokens} "
                "tokens; give at most so many with --block-tokens"
            )

    @property
    def call_choices_max(self) -> int:
        """Most choices one request may really have: all of them may have to wait."""
        return min(self.choices_max, self.scheduling.queue_requests_max)


def _check_ranges(config: object, ranges: Mapping[str, Range]) -> None:
    """None means that there is no such limit."""
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        if value is None or (least <= value <= most and math.isfinite(value)):
            continue
        allowed = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        finite = "" if math.isfinite(value) else " and finite"
        raise ConfigurationError(f"{name} is {value}; it must be {allowed}{finite}")
