"""The options of `polychip serve`, one a field of ServeSettings; docs/settings.md lists them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from control_plane.config import SchedulingConfig
from scripts.cli.limit_options import limit_options

Command = TypeVar("Command", bound=Callable[..., object])

DEFAULTS = SchedulingConfig()
COUNT = click.IntRange(min=1)
PORT = click.IntRange(min=0, max=65535)
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
        "--model-name",
        default="",
        show_default="name of the file",
        help="Name clients use; `default` always works too.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        help="Number format the model is computed in.",
    ),
    click.option(
        "--context",
        "context_tokens",
        type=COUNT,
        show_default="what the model allows",
        help="Most tokens of prompt and output together.",
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
        "--kv-policy",
        type=click.Choice(["cover", "replicate", "shard"]),
        default="cover",
        help="Which KV heads each chip of a group keeps.",
    ),
    click.option(
        "--block-tokens",
        type=COUNT,
        default=DEFAULTS.block_tokens,
        help="Tokens in a block of KV memory.",
    ),
    click.option(
        "--kv-blocks",
        type=numbers,
        metavar="N,N,...",
        show_default="what is needed, at most a quarter of the free memory",
        help="Blocks of KV memory: one number for all chips, or one per chip, such as 64,48.",
    ),
)

SCHEDULING_OPTIONS = (
    click.option(
        "--policy",
        type=click.Choice(["lpm", "fcfs"]),
        default=DEFAULTS.policy,
        help="Who goes first: longest cached prefix, or first come.",
    ),
    click.option(
        "--prefix-cache",
        type=click.Choice(["on", "off"]),
        default="on" if DEFAULTS.prefix_cache else "off",
        help="Reuse of what was computed for equal beginnings.",
    ),
    click.option(
        "--chunk-tokens",
        type=COUNT,
        default=DEFAULTS.chunk_tokens,
        help="Most prompt tokens computed in one step.",
    ),
    click.option(
        "--max-running",
        "running_max",
        type=COUNT,
        default=DEFAULTS.running_max,
        help="Most requests a group computes at once.",
    ),
    click.option(
        "--max-queue",
        "queue_max",
        type=COUNT,
        default=DEFAULTS.queue_requests_max,
        help="Most requests that wait; more are refused.",
    ),
    click.option(
        "--tokenizer-threads",
        type=COUNT,
        show_default="half the cores",
        help="Threads that turn text into tokens and back.",
    ),
)

NETWORK_OPTIONS = (
    click.option("--host", default="127.0.0.1", help="Address clients reach it at."),
    click.option("--http-port", type=PORT, default=8000, help="HTTP port; 0 picks a free one."),
    click.option("--grpc-port", type=PORT, default=50051, help="gRPC port; 0 picks a free one."),
    click.option("--worker-host", default="127.0.0.1", help="Address workers reach it at."),
    click.option(
        "--worker-port", type=PORT, default=50052, help="Port workers dial; 0 picks a free one."
    ),
    click.option(
        "--join-token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the secret that admits workers.",
    ),
    click.option("--announce", type=FILE, help="File that receives the ports as JSON."),
    click.option("--debug-api", is_flag=True, help="Serve AdminService.DebugLogits."),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="warning",
        help="Least severity that is logged, to standard error.",
    ),
)


SETTINGS_OPTIONS = (*MODEL_OPTIONS, *CHIP_OPTIONS, *SCHEDULING_OPTIONS, *NETWORK_OPTIONS)


def serve_options(command: Command) -> Command:
    """Adds every option of `polychip serve`."""
    command = limit_options(command)
    for option in reversed(SETTINGS_OPTIONS):
        command = option(command)
    return command
