"""The options of `polychip serve`: those of this command, and the control plane's own table."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from control_plane import settings

Command = TypeVar("Command", bound=Callable[..., object])

COUNT = click.IntRange(min=1)
FILE = click.Path(dir_okay=False, path_type=Path)


def numbers(text: str) -> tuple[int, ...]:
    """Positive whole numbers with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of positive whole numbers such as 2,1")
    return tuple(int(part) for part in parts)


MODEL_OPTIONS = (
    click.option(
        "--model",
        "model_path",
        type=click.Path(exists=True, path_type=Path),
        show_default="the packaged SmolLM2-135M-Instruct",
        help="GGUF file, or folder in Hugging Face layout.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        help="Number format the model is computed in.",
    ),
)

CHIP_OPTIONS = (
    click.option("--backend", default="cpu", envvar="POLYCHIP_BACKEND", help="Make of the chips."),
    click.option(
        "--chips",
        type=COUNT,
        show_default="one per NUMA node",
        help="Number of chips, each a group of its own.",
    ),
    click.option(
        "--groups",
        "group_sizes",
        type=numbers,
        metavar="N,N,...",
        show_default="as --chips says",
        help="Chips of each group, such as 2,1; the chips of a group share one copy of the model.",
    ),
    click.option(
        "--kv-blocks",
        type=numbers,
        metavar="N,N,...",
        show_default="what is needed, at most a quarter of the free memory",
        help="Blocks of KV memory: one number for all chips, or one per chip, such as 64,48.",
    ),
)

NETWORK_OPTIONS = (
    click.option(
        "--api-key-file", type=FILE, help="File with the keys clients may use, one a line."
    ),
    click.option("--join-token-file", type=FILE, help="File with the secret that admits workers."),
    click.option("--announce", type=FILE, help="File that receives the ports as JSON."),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="warning",
        help="Least severity that is logged, to standard error.",
    ),
)


def serve_options(command: Command) -> Command:
    """Adds every option of `polychip serve`, in the order of docs/settings.md."""
    command = settings.settings_options(settings.FURTHER)(command)
    command = settings.settings_options(settings.REQUESTS)(command)
    command = _with(NETWORK_OPTIONS, command)
    command = settings.settings_options(settings.NETWORK)(command)
    command = settings.settings_options(settings.SCHEDULING)(command)
    command = settings.settings_options(settings.CHIPS)(command)
    command = _with(CHIP_OPTIONS, command)
    command = settings.settings_options(settings.MODEL)(command)
    return _with(MODEL_OPTIONS, command)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
