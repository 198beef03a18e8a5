"""Settings of `polychip serve` and the commands they make of the two kinds of process."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServeSettings:
    """Everything `polychip serve` can be told; see docs/settings.md for the meaning of each.

    None and "auto" mean that the process concerned decides. group_sizes: chips of each group.
    kv_blocks: one number for all chips, or one a chip; empty means what memory allows.
    """

    model_path: str
    model_name: str
    backend: str
    group_sizes: tuple[int, ...]
    dtype: str
    kv_policy: str
    policy: str
    prefix_cache: bool
    host: str
    http_port: int
    grpc_port: int
    worker_host: str
    worker_port: int
    block_tokens: int
    kv_blocks: tuple[int, ...]
    chunk_tokens: int
    running_max: int
    queue_max: int
    context_tokens: int | None
    tokenizer_threads: int
    join_token_file: Path | None
    debug_api: bool
    log_level: str

    limits: Mapping[str, int | float]
    """Further limits of the control plane: option to value."""

    @property
    def chips_count(self) -> int:
        """Chips of all groups together: so many workers are started."""
        return sum(self.group_sizes)


def dialled(host: str) -> str:
    """The address to dial from this machine for an address that is listened on."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def worker_id(chip_index: int) -> str:
    """Name of the worker of a chip."""
    return f"chip{chip_index}"


def control_plane_command(settings: ServeSettings, announce_path: str) -> list[str]:
    """Arguments that start the control plane of `settings`."""
    command = [sys.executable, "-m", "control_plane"]
    command += ["--model", settings.model_path, "--model-name", settings.model_name]
    command += ["--groups", _joined(settings.group_sizes)]
    command += ["--kv-policy", settings.kv_policy, "--policy", settings.policy]
    command += ["--prefix-cache", "on" if settings.prefix_cache else "off"]
    command += ["--host", settings.host]
    command += ["--http-port", str(settings.http_port), "--grpc-port", str(settings.grpc_port)]
    command += ["--worker-host", settings.worker_host]
    command += ["--worker-port", str(settings.worker_port)]
    command += ["--block-tokens", str(settings.block_tokens)]
    command += ["--chunk-tokens", str(settings.chunk_tokens)]
    command += ["--max-running", str(settings.running_max)]
    command += ["--max-queue", str(settings.queue_max)]
    command += ["--tokenizer-threads", str(settings.tokenizer_threads)]
    command += ["--log-level", settings.log_level, "--announce", announce_path]
    command += ["--exit-with-parent"]
    if settings.context_tokens is not None:
        command += ["--context", str(settings.context_tokens)]
    if settings.debug_api:
        command += ["--debug-api"]
    command += _join_token(settings)
    for option, value in settings.limits.items():
        command += [option, str(value)]
    return command


def worker_command(settings: ServeSettings, chip_index: int, worker_port: int) -> list[str]:
    """Arguments that start the worker of one chip, given the port the control plane listens on."""
    command = [sys.executable, "-m", "chip_worker"]
    command += ["--worker-id", worker_id(chip_index)]
    command += ["--control-plane", f"{dialled(settings.worker_host)}:{worker_port}"]
    command += ["--model", settings.model_path, "--model-name", settings.model_name]
    command += ["--backend", settings.backend, "--dtype", settings.dtype]
    command += ["--chip", str(chip_index), "--chips-on-host", str(settings.chips_count)]
    command += ["--log-level", settings.log_level, "--exit-with-parent"]
    command += _join_token(settings)
    if settings.kv_blocks:
        own_index = min(chip_index, len(settings.kv_blocks) - 1)
        command += ["--kv-blocks", str(settings.kv_blocks[own_index])]
    return command


def _join_token(settings: ServeSettings) -> list[str]:
    return ["--join-token-file", str(settings.join_token_file)] if settings.join_token_file else []


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)
