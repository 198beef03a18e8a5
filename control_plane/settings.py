"""The settings of the control plane: one table for `polychip serve` and `python -m control_plane`.

command line --click--> values by field --config_of--> ControlPlaneConfig

Defaults and ranges stand in config.py; flags and meanings stand here. docs/settings.md lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import click

from control_plane.config import (
    KV_POLICIES,
    POLICIES,
    SCHEDULING_RANGES,
    SERVICE_RANGES,
    ControlPlaneConfig,
    Range,
    SchedulingConfig,
)
from control_plane.errors import ConfigurationError
from control_plane.intake.api_keys import is_key

Command = TypeVar("Command", bound=Callable[..., object])

RANGES = SCHEDULING_RANGES | SERVICE_RANGES
SCHEDULING_FIELDS = {each.name for each in fields(SchedulingConfig)}
DEFAULTS = {
    each.name: each.default for each in (*fields(ControlPlaneConfig), *fields(SchedulingConfig))
}
SWITCH = ("on", "off")


@dataclass(frozen=True)
class Setting:
    """An option and the field of the configuration it sets; times in seconds, sizes in bytes.

    choices: its values, if they are words. default_text: what holds where the option is left out,
    if the field's default does not say it.
    """

    flag: str
    field: str
    help: str
    choices: tuple[str, ...] = ()
    default_text: str = ""

    @property
    def default(self) -> object:
        """The option's: the field's own, or None for what `default_text` says."""
        return None if self.default_text else DEFAULTS[self.field]

    @property
    def range(self) -> Range | None:
        """What a number may be."""
        return RANGES.get(self.field)

    def of(self, config: ControlPlaneConfig) -> object:
        """Its value in a configuration."""
        owner = config.scheduling if self.field in SCHEDULING_FIELDS else config
        return getattr(owner, self.field)

    def arguments(self, config: ControlPlaneConfig) -> list[str]:
        """What gives a process the value it has in a configuration."""
        value = self.of(config)
        if self.choices == SWITCH:
            return [self.flag, "on" if value else "off"]
        if isinstance(value, bool):
            return [self.flag] if value else []
        return [] if value is None else [self.flag, str(value)]

    def add_to(self, command: Command) -> Command:
        """Adds the option to a command."""
        shown = self.default_text or True
        if self.choices == SWITCH:
            return click.option(
                self.flag,
                self.field,
                type=click.Choice(self.choices),
                default="on" if self.default else "off",
                callback=_is_on,
                show_default=shown,
                help=self.help,
            )(command)
        if isinstance(self.default, bool):
            return click.option(self.flag, self.field, is_flag=True, help=self.help)(command)
        return click.option(
            self.flag,
            self.field,
            type=self._type(),
            default=self.default,
            show_default=shown,
            help=self.help,
        )(command)

    def _type(self) -> object:
        """What click converts and checks it with."""
        if self.choices:
            return click.Choice(self.choices)
        if self.range is None:
            return str
        most = None if self.range.most == float("inf") else self.range.most
        if isinstance(self.default, float):
            return click.FloatRange(self.range.least, most)
        return click.IntRange(int(self.range.least), None if most is None else int(most))


def _is_on(context: click.Context, parameter: click.Parameter, value: str) -> bool:
    del context, parameter
    return value == "on"


MODEL = (
    Setting(
        "--model-name",
        "model_name",
        "Name clients use; `default` always works too.",
        default_text="name of the file",
    ),
    Setting(
        "--context",
        "context_tokens",
        "Most tokens of prompt and output together.",
        default_text="what the model allows",
    ),
)

CHIPS = (
    Setting(
        "--kv-policy",
        "kv_policy",
        "Which KV heads each chip of a group keeps.",
        choices=KV_POLICIES,
    ),
    Setting("--block-tokens", "block_tokens", "Tokens in a block of KV memory."),
    Setting(
        "--fewer-chips",
        "fewer_chips",
        "Groups form without chips that fail or do not come.",
        choices=SWITCH,
    ),
)

SCHEDULING = (
    Setting(
        "--policy",
        "policy",
        "Who goes first: longest cached prefix, first come, shortest prompt, highest priority.",
        choices=POLICIES,
    ),
    Setting(
        "--prefix-cache",
        "prefix_cache",
        "Reuse of what was computed for equal beginnings.",
        choices=SWITCH,
    ),
    Setting("--chunk-tokens", "chunk_tokens", "Most prompt tokens computed in one step."),
    Setting(
        "--decode-latency-target",
        "decode_latency_target_ms",
        "Milliseconds a step may take in which somebody decodes; 0 for any.",
    ),
    Setting("--max-running", "running_max", "Most requests a group computes at once."),
    Setting("--max-queue", "queue_requests_max", "Most requests that wait; more are refused."),
    Setting("--max-queue-tokens", "queue_tokens_max", "Most tokens that wait; more are refused."),
)

NETWORK = (
    Setting("--host", "host", "Address clients reach it at."),
    Setting("--http-port", "http_port", "HTTP port; 0 picks a free one."),
    Setting("--grpc-port", "grpc_port", "gRPC port; 0 picks a free one."),
    Setting(
        "--frontends",
        "frontends",
        "Processes that take requests, on the same ports; 0: the control plane does it itself.",
    ),
    Setting("--worker-host", "worker_host", "Address workers reach it at."),
    Setting("--worker-port", "worker_port", "Port workers dial; 0 picks a free one."),
    Setting("--debug-api", "debug_api", "Serve AdminService.DebugLogits."),
)

REQUESTS = (
    Setting(
        "--max-choices",
        "choices_max",
        "Most choices of a request: its prompts times n; at most --max-queue.",
    ),
    Setting(
        "--max-prompt-scores",
        "prompt_scores_max",
        "Most scores of a request's prompts: their tokens times 1 + likeliest.",
    ),
    Setting("--max-top-logprobs", "top_logprobs_max", "Most likeliest tokens listed at a place."),
    Setting("--max-stop-strings", "stop_strings_max", "Most stop strings of a request."),
    Setting(
        "--max-stop-string-characters",
        "stop_string_characters_max",
        "Most characters of a stop string.",
    ),
    Setting("--max-stop-token-ids", "stop_token_ids_max", "Most stop tokens of a request."),
    Setting("--max-logit-biases", "logit_bias_max", "Most tokens a request gives a bias."),
    Setting("--http-body-bytes", "http_body_bytes_max", "Bytes of the largest HTTP body."),
    Setting("--max-json-values", "json_values_max", "Most values of an HTTP body."),
    Setting("--body-deadline", "body_deadline_s", "Seconds a client may take to send a body."),
    Setting(
        "--client-message-bytes",
        "client_message_bytes_max",
        "Bytes of the largest gRPC message of a client.",
    ),
    Setting(
        "--intake-bytes",
        "intake_bytes_max",
        "Bytes of requests held at once: while they are read, over gRPC until answered.",
    ),
    Setting(
        "--tokenizer-threads",
        "tokenizer_threads",
        "Threads that turn text into tokens and back.",
        default_text="half the cores",
    ),
    Setting(
        "--stream-stall", "stream_buffer_stall_s", "Seconds a client may leave its answer unread."
    ),
    Setting("--drain-deadline", "drain_deadline_s", "Seconds running requests get after SIGTERM."),
)

FURTHER = (
    Setting(
        "--admission-tokens", "admission_tokens_max", "Most token ids a step sends of a request."
    ),
    Setting(
        "--oldest-prefill-share", "oldest_prefill_share", "Part of a chunk the oldest prompt gets."
    ),
    Setting(
        "--prefill-time-share",
        "prefill_time_share_min",
        "Least part of a step's time for prompts, whatever the latency target.",
    ),
    Setting("--ageing", "ageing_s", "Seconds of waiting after which arrival decides the order."),
    Setting(
        "--retractions-before-reservation",
        "retractions_before_reservation",
        "Retractions after which a request returns only with all its blocks.",
    ),
    Setting("--pipeline-depth", "pipeline_depth", "Steps sent before a result returns."),
    Setting("--plan-lead", "plan_lead_s", "Seconds before the end of a step the next is planned."),
    Setting("--digest-interval", "digest_interval_steps", "Steps between checks of slot tables."),
    Setting("--heartbeat-interval", "heartbeat_interval_s", "Seconds between heartbeats."),
    Setting("--lease", "lease_s", "Seconds without an answer after which a worker gives up."),
    Setting("--heartbeat-timeout", "heartbeat_timeout_s", "Seconds of silence that lose a worker."),
    Setting(
        "--formation-heartbeat-timeout",
        "formation_heartbeat_timeout_s",
        "Seconds of silence that lose a worker that loads the model.",
    ),
    Setting(
        "--start-deadline",
        "start_deadline_s",
        "Seconds a group waits for the rest of its chips once one is there.",
    ),
    Setting("--formation-deadline", "formation_deadline_s", "Seconds a group may take to form."),
    Setting("--probe-deadline", "probe_deadline_s", "Seconds a new group's first sum may take."),
    Setting("--step-deadline", "step_deadline_s", "Seconds a step may take."),
    Setting(
        "--recovery-timeout",
        "recovery_timeout_s",
        "Seconds requests of a lost group wait for one that serves.",
    ),
    Setting("--group-deaths", "group_deaths_max", "Lost groups after which a request runs alone."),
    Setting("--own-faults", "own_faults_max", "Faults of its own that put a chip out of service."),
    Setting("--own-faults-window", "own_faults_window_s", "Seconds over which they are counted."),
    Setting(
        "--frontend-start-deadline",
        "frontend_start_deadline_s",
        "Seconds a frontend may take until it takes requests.",
    ),
    Setting(
        "--worker-message-bytes",
        "worker_message_bytes_max",
        "Bytes of the largest message of a worker.",
    ),
)

SETTINGS = (*MODEL, *CHIPS, *SCHEDULING, *NETWORK, *REQUESTS, *FURTHER)


def settings_options(settings: Sequence[Setting]) -> Callable[[Command], Command]:
    """Adds an option for each setting, in this order."""

    def add(command: Command) -> Command:
        for setting in reversed(settings):
            command = setting.add_to(command)
        return command

    return add


def config_of(values: Mapping[str, object]) -> ControlPlaneConfig:
    """The configuration whose fields, those of scheduling among them, have these values.

    None means the field's default. Raises ConfigurationError if they do not fit together.
    """
    given = {name: value for name, value in values.items() if value is not None}
    scheduling = {name: value for name, value in given.items() if name in SCHEDULING_FIELDS}
    service = {name: value for name, value in given.items() if name not in SCHEDULING_FIELDS}
    return ControlPlaneConfig(
        **service,  # type: ignore[arg-type]
        scheduling=SchedulingConfig(**scheduling),  # type: ignore[arg-type]
    )


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; blank lines and those that begin with # are skipped.

    Raises ConfigurationError that names the file and the line, never a key.
    """
    keys = []
    for number, line in enumerate(_read_text(path, "--api-key-file").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not is_key(key):
            raise ConfigurationError(
                f"--api-key-file {path}: line {number} holds a blank or a character beyond ASCII, "
                "which no key can; write one key a line"
            )
        keys.append(key)
    if not keys:
        raise ConfigurationError(
            f"--api-key-file {path}: holds no key; write one a line, or leave the option out to "
            "serve everybody"
        )
    return tuple(dict.fromkeys(keys))


def read_join_token(path: Path) -> str:
    """The secret that admits workers; raises ConfigurationError if there is none."""
    token = _read_text(path, "--join-token-file").strip()
    if not token:
        raise ConfigurationError(f"--join-token-file {path}: is empty; write the secret into it")
    return token


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{flag} {path}: not UTF-8: {error.reason}") from error
