"""Settings of `polychip serve` and the commands they make of the two kinds of process."""

import sys
from dataclasses import dataclass
from pathlib import Path

from control_plane.config import ControlPlaneConfig
from control_plane.settings import SETTINGS


@dataclass(frozen=True)
class ServeSettings:
    """Everything `polychip serve` can be told; see docs/settings.md for the meaning of each.

    control_plane: without the secrets, which the process reads from the files itself. dtype "auto":
    the worker decides. kv_blocks: one number for all chips, or one a chip; empty means what memory
    allows.
    """

    control_plane: ControlPlaneConfig
    backend: str
    dtype: str
    kv_blocks: tuple[int, ...]
    join_token_file: Path | None
    api_key_file: Path | None
    log_level: str

    @property
    def host(self) -> str:
        """The address clients reach it at."""
        return self.control_plane.host

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Chips of each group."""
        return self.control_plane.scheduling.group_sizes

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
    command += ["--model", settings.control_plane.model_path]
    command += ["--groups", _joined(settings.group_sizes)]
    command += ["--log-level", settings.log_level, "--announce", announce_path]
    command += ["--exit-with-parent"]
    command += _file("--join-token-file", settings.join_token_file)
    command += _file("--api-key-file", settings.api_key_file)
    for setting in SETTINGS:
        command += setting.arguments(settings.control_plane)
    return command


def worker_command(settings: ServeSettings, chip_index: int, worker_port: int) -> list[str]:
    """Arguments that start the worker of one chip, given the port the control plane listens on."""
    command = [sys.executable, "-m", "chip_worker"]
    command += ["--worker-id", worker_id(chip_index)]
    control_plane = settings.control_plane
    command += ["--control-plane", f"{dialled(control_plane.worker_host)}:{worker_port}"]
    command += ["--model", control_plane.model_path, "--model-name", control_plane.model_name]
    command += ["--backend", settings.backend, "--dtype", settings.dtype]
    command += ["--chip", str(chip_index), "--chips-on-host", str(settings.chips_count)]
    command += ["--log-level", settings.log_level, "--exit-with-parent"]
    command += _file("--join-token-file", settings.join_token_file)
    if settings.kv_blocks:
        own_index = min(chip_index, len(settings.kv_blocks) - 1)
        command += ["--kv-blocks", str(settings.kv_blocks[own_index])]
    return command


def _file(flag: str, path: Path | None) -> list[str]:
    return [] if path is None else [flag, str(path)]


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)
