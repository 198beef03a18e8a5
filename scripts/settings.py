"""Settings of `polychip serve` and the commands they make of the two kinds of process."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chip_worker.config import ACQUIRE_DEADLINE_S, CAPTURED_TOKENS
from control_plane.config import ControlPlaneConfig
from control_plane.settings import SETTINGS


@dataclass(frozen=True)
class ChipPlace:
    """Where a chip stands.

    index: its number over all groups, which names its worker. group: number of its group.
    local_index: its position among the chips of its backend, and in the list of their devices.
    """

    index: int
    group: int
    backend: str
    local_index: int


@dataclass(frozen=True)
class ServeSettings:
    """Everything `polychip serve` can be told; see docs/settings.md for the meaning of each.

    control_plane: without the secrets, which the process reads from the files itself. dtype "auto":
    the worker decides. kv_blocks: one number for all chips, or one a chip; empty means what memory
    allows. backend: of the groups that name none. group_backends: one a group; empty means
    `backend` for all. devices: ids by backend, one a chip; a backend that is missing takes its
    first chips. backend_options: NAME=VALUE texts by backend. debug_backend: None: no records.
    weights: how workers hold them. settings_file: the calibration that some of it comes from.
    """

    control_plane: ControlPlaneConfig
    backend: str
    dtype: str
    kv_blocks: tuple[int, ...]
    join_token_file: Path | None
    api_key_file: Path | None
    log_level: str
    group_backends: tuple[str, ...] = ()
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    backend_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    acquire_deadline_s: float = ACQUIRE_DEADLINE_S
    debug_backend: str | None = None
    debug_backend_calls: int = 256
    captured_tokens: int = CAPTURED_TOKENS
    weights: str = "auto"
    settings_file: Path | None = None

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

    @property
    def backend_of_group(self) -> tuple[str, ...]:
        """The backend of each group."""
        return self.group_backends or (self.backend,) * len(self.group_sizes)

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that serves, once, in the order of the groups."""
        return tuple(dict.fromkeys(self.backend_of_group))

    def chips_of(self, backend: str) -> int:
        """Chips of one backend, over all groups."""
        sizes = zip(self.backend_of_group, self.group_sizes, strict=True)
        return sum(size for name, size in sizes if name == backend)

    def chip_places(self) -> tuple[ChipPlace, ...]:
        """Every chip, in the order of their numbers."""
        counts: dict[str, int] = {}
        places: list[ChipPlace] = []
        pairs = zip(self.backend_of_group, self.group_sizes, strict=True)
        for group, (backend, size) in enumerate(pairs):
            for _ in range(size):
                local_index = counts.get(backend, 0)
                counts[backend] = local_index + 1
                places.append(ChipPlace(len(places), group, backend, local_index))
        return tuple(places)


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


def worker_command(settings: ServeSettings, chip_index: int, worker_port: str) -> list[str]:
    """Arguments that start the worker of one chip.

    worker_port: where its control plane listens, as `--control-plane` takes it behind the colon: a
    number, or @FILE.
    """
    command = [sys.executable, "-m", "chip_worker"]
    command += ["--worker-id", worker_id(chip_index)]
    control_plane, chip = settings.control_plane, settings.chip_places()[chip_index]
    command += ["--control-plane", f"{dialled(control_plane.worker_host)}:{worker_port}"]
    command += ["--model", control_plane.model_path, "--model-name", control_plane.model_name]
    command += ["--backend", chip.backend, "--dtype", settings.dtype]
    command += ["--weights", settings.weights]
    command += ["--chip", str(chip.local_index)]
    command += ["--chips-on-host", str(settings.chips_of(chip.backend))]
    if devices := settings.devices.get(chip.backend):
        command += ["--devices", ",".join(devices)]
    for option in settings.backend_options.get(chip.backend, ()):
        command += ["--backend-option", option]
    command += ["--acquire-deadline", str(settings.acquire_deadline_s)]
    command += ["--captured-tokens", str(settings.captured_tokens)]
    command += ["--log-level", settings.log_level, "--exit-with-parent"]
    if settings.debug_backend is not None:
        command += ["--debug-backend", settings.debug_backend]
        command += ["--debug-backend-calls", str(settings.debug_backend_calls)]
    command += _file("--join-token-file", settings.join_token_file)
    if settings.kv_blocks:
        own_index = min(chip_index, len(settings.kv_blocks) - 1)
        command += ["--kv-blocks", str(settings.kv_blocks[own_index])]
    return command


def _file(flag: str, path: Path | None) -> list[str]:
    return [] if path is None else [flag, str(path)]


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)
