"""`python -m chip_worker`: reads flags, starts the backend before torch, then serves one chip.

ready_backend -> import torch -> worker.serve
"""

import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import structlog

from backends.errors import BackendError
from backends.plugin import AUTO, Backend, BackendConfig, ready_backend
from chip_worker.config import (
    ACQUIRE_DEADLINE_S,
    CAPTURED_TOKENS,
    CAPTURED_TOKENS_MAX,
    WEIGHTS,
    WorkerConfig,
)
from chip_worker.errors import ConfigurationError, ModelError
from chip_worker.exit_code import ExitCode
from chip_worker.logs import configure_logging
from chip_worker.status_file import check_status_file

THREAD_SWITCH_S = 0.0005
"""A compute thread in Python code gives the connection thread its turn after this long."""
PR_SET_PDEATHSIG = 1

BACKEND_CHOSEN = "worker.backend_chosen"
BACKEND_REJECTED = "worker.backend_rejected"
BACKEND_FAILED = "worker.backend_failed"
MODEL_FAILED = "worker.model_failed"
OPTION_REFUSED = "worker.option_refused"

_log = structlog.get_logger()


@click.command(context_settings={"max_content_width": 100})
@click.option("--worker-id", help="Stable name of this worker, such as chip0.")
@click.option(
    "--control-plane",
    help="HOST:PORT of the control plane's worker port; with @FILE for PORT it is the one that the "
    "control plane announces in the file, once it does.",
)
@click.option("--model", "model_path", help="GGUF file or Hugging Face directory.")
@click.option("--model-name", default="", help="Name of the model, for people.")
@click.option(
    "--backend",
    envvar="POLYCHIP_BACKEND",
    default="cpu",
    show_default=True,
    show_envvar=True,
    help="Make of the chip: NAME, NAME:VARIANT, or auto for the first that can serve here.",
)
@click.option(
    "--backend-option", "backend_options", multiple=True, help="NAME=VALUE for the backend."
)
@click.option(
    "--chip",
    "chip_indices",
    type=click.IntRange(min=0),
    multiple=True,
    default=(0,),
    show_default=True,
    help="Index of the chip; given more than once, the first that opens is taken.",
)
@click.option(
    "--devices",
    default="",
    metavar="ID,ID,...",
    help="Ids of the chips of the service, in its order; --chip is a position in this list.",
)
@click.option(
    "--acquire-deadline",
    "acquire_deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=ACQUIRE_DEADLINE_S,
    show_default=True,
    help="Seconds that opening the chip may take.",
)
@click.option(
    "--debug-backend",
    is_flag=False,
    flag_value="*",
    metavar="[PATTERN]",
    help="Log each call of a backend primitive, or of those of a pattern such as 'kernels.*'.",
)
@click.option(
    "--debug-backend-calls",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Primitive calls that are kept and logged at a fault, with --debug-backend.",
)
@click.option(
    "--captured-tokens",
    type=click.IntRange(min=0, max=CAPTURED_TOKENS_MAX),
    default=CAPTURED_TOKENS,
    show_default=True,
    help="Steps of at most so many tokens are captured where the chip can; 0: none.",
)
@click.option("--chips-on-host", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="Such as float32 or bfloat16.")
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    default="auto",
    show_default=True,
    help="How weights are held: bf16: in the dtype; int8; native: as the GGUF file has them.",
)
@click.option("--kv-blocks", type=click.IntRange(min=1), help="Default: what memory allows.")
@click.option(
    "--status-file",
    envvar="POLYCHIP_STATUS_FILE",
    show_envvar=True,
    help="File that tells the worker's health.",
)
@click.option(
    "--join-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the secret that admits this worker.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.option("--exit-with-parent", is_flag=True, help="Die when the launcher dies.")
@click.option("--health", is_flag=True, help="Read --status-file; exit 0 if healthy, 1 if not.")
def command(
    *,
    health: bool,
    exit_with_parent: bool,
    join_token_file: Path | None,
    backend_options: tuple[str, ...],
    devices: str,
    model_name: str,
    log_level: str,
    **settings: Any,  # noqa: ANN401 - one value an option above
) -> None:
    """Compute with one chip for a control plane, until it or SIGTERM says to leave."""
    if health:
        report_health(settings["status_file"])
    # What was asked for by name is not to be hidden by the severity of everything else.
    asks_for_calls = settings["debug_backend"] is not None
    configure_logging("info" if asks_for_calls and log_level != "debug" else log_level)
    # gRPC's own log tells of every control plane that goes; our log says it in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if exit_with_parent:
        die_with_parent()
    for name, flag in (
        ("worker_id", "--worker-id"),
        ("control_plane", "--control-plane"),
        ("model_path", "--model"),
    ):
        if not settings[name]:
            raise click.UsageError(f"{flag} is missing")
    backend_name = settings.pop("backend")
    try:
        config = WorkerConfig(
            **settings,
            backend=backend_name,
            devices=tuple(part.strip() for part in devices.split(",") if part.strip()),
            backend_options=parse_options(backend_options),
            join_token=None if join_token_file is None else read_join_token(join_token_file),
        )
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(run(config, model_name))


def read_join_token(path: Path) -> str:
    """The secret that admits this worker; raises ConfigurationError if there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--join-token-file {path}: {error}") from error
    if not token:
        raise ConfigurationError(f"--join-token-file {path}: is empty; write the secret into it")
    return token


def run(config: WorkerConfig, model_name: str = "") -> ExitCode:
    """Serves until told to leave; an option, backend or model that fails is told by the code."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    try:
        config, backend, backend_config = start_backend(config)
        # Imports torch, which some vendors prepare in on_init.
        worker = import_to_stay("chip_worker.worker")
        ended: ExitCode = worker.serve(config, backend, backend_config, model_name)
    except ConfigurationError as error:
        _log.error(OPTION_REFUSED, error=str(error))
        return ExitCode.USAGE
    except ModelError as error:
        _log.error(MODEL_FAILED, error=str(error))
        return ExitCode.MODEL_FAILED
    except (BackendError, ImportError):
        _log.exception(BACKEND_FAILED, backend=config.backend)
        return ExitCode.BACKEND_FAILED
    return ended


def import_to_stay(name: str) -> ModuleType:
    """Imports a module with all it needs, none of which the garbage collector ever looks at.

    What torch makes when it is imported stays: looking for garbage in it takes a third of the time
    of the import, and each later time as long as several steps.
    """
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def start_backend(config: WorkerConfig) -> tuple[WorkerConfig, Backend, BackendConfig]:
    """The backend after `on_init`, and the settings with its name; torch is not imported yet.

    Raises BackendError or, from the backend's own module, ImportError.
    """
    backend_config = BackendConfig(
        chip_indices=config.chip_indices,
        devices=config.devices,
        chips_on_host=config.chips_on_host,
        dtype=config.dtype,
        options=config.backend_options,
    )
    found = ready_backend(config.backend, backend_config)
    if config.backend == AUTO:
        for name, reason in found.rejected:
            _log.info(BACKEND_REJECTED, backend=name, reason=reason)
        _log.info(BACKEND_CHOSEN, backend=found.name)
    return replace(config, backend=found.name), found.backend, backend_config


def report_health(status_file: str | None) -> None:
    """Prints what the status file says and ends the process with it."""
    if status_file is None:
        raise click.UsageError("--health needs --status-file")
    healthy, why = check_status_file(status_file, time.time())
    click.echo(why)
    sys.exit(0 if healthy else 1)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux only)."""
    parent = os.getppid()
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise click.ClickException("--exit-with-parent: this system has no prctl")
    if os.getppid() != parent:
        sys.exit(ExitCode.FAILED)


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE texts as a mapping."""
    options = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--backend-option")
        options[name] = value
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with an ExitCode."""
    command.main(args=None if argv is None else list(argv), prog_name="polychip worker")


if __name__ == "__main__":
    main()
