"""The options of `polychip serve`: those of this command, and the control plane's own table."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeVar

import click
from typing_extensions import override

from chip_worker.config import ACQUIRE_DEADLINE_S, CAPTURED_TOKENS, CAPTURED_TOKENS_MAX, WEIGHTS
from control_plane import settings
from control_plane.config import BLOCKS_MAX, SECONDS_MAX, UINT32_MAX
from scripts.cli.chip_options import CHIPS_MAX, chip_groups
from scripts.cli.output_files import replaced_file
from scripts.cli.settings_file import take_settings
from scripts.topology import PACKAGED_MODELS

Command = TypeVar("Command", bound=Callable[..., object])

CALIBRATED_SETTINGS = (
    "--kv-policy",
    "--block-tokens",
    "--start-deadline",
    "--formation-deadline",
    "--probe-deadline",
    "--step-deadline",
)
"""Those of the control plane's that matter where single steps are measured."""

COUNT = click.IntRange(1, UINT32_MAX)
FILE = click.Path(dir_okay=False, path_type=Path)


def block_counts(text: str) -> tuple[int, ...]:
    """Positive whole numbers, as many blocks as a pool may have, with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= BLOCKS_MAX for part in parts):
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers from 1 to {BLOCKS_MAX} such as 64,48"
        )
    return tuple(int(part) for part in parts)


class ModelPath(click.Path):
    """A path that exists, or the name of a packaged model, which becomes its path."""

    @override
    def convert(
        self, value: str | PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        packaged = PACKAGED_MODELS.get(str(value))
        if packaged is not None:
            installed = packaged.path()
            if installed is None:
                why = f"the packaged model {value} is not installed; run {packaged.install}"
                self.fail(why, param, ctx)
            return installed
        if not Path(value).exists():
            self.fail(
                f"there is no file or folder {str(value)!r}; give a GGUF file, a folder in Hugging "
                f"Face layout, or the name of a packaged model: {', '.join(PACKAGED_MODELS)}",
                param,
                ctx,
            )
        return Path(value)


MODEL_OPTIONS = (
    click.option(
        "--model",
        "model_path",
        type=ModelPath(),
        default="default",
        show_default="the packaged SmolLM2-135M-Instruct",
        help="GGUF file, folder in Hugging Face layout, or gemma3 once `scripts/setup --model "
        "gemma3` has installed it.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        help="Number format the model is computed in.",
    ),
    click.option(
        "--weights",
        type=click.Choice(WEIGHTS),
        default="auto",
        help="How weights are held: bf16: in the number format of --dtype; int8: rounded to 8 "
        "bits; native: as the GGUF file has them.",
    ),
)

CHIP_OPTIONS = (
    click.option(
        "--backend",
        default="cpu",
        envvar="POLYCHIP_BACKEND",
        show_envvar=True,
        help="Make of the chips: NAME, NAME:VARIANT, or auto for the first that can serve here.",
    ),
    click.option(
        "--backend-option",
        "backend_options",
        multiple=True,
        metavar="NAME=VALUE",
        show_default="none",
        help="Setting of the backends, once each; BACKEND.NAME=VALUE for one of several.",
    ),
    click.option(
        "--chips",
        type=click.IntRange(1, CHIPS_MAX),
        show_default="as many as --devices names, else one per NUMA node",
        help="Number of chips, each a group of its own.",
    ),
    click.option(
        "--groups",
        type=chip_groups,
        metavar="N,N,...",
        show_default="as --chips says",
        help="Chips of each group, such as 2,1, of other makes as cpu:2,sim:ideal:1; the chips of "
        "a group share one copy of the model.",
    ),
    click.option(
        "--devices",
        metavar="ID,ID,...",
        show_default="the first ones",
        help="Ids or names of the chips to take, in their order; with several makes "
        "'cpu=0,1;sim=5'.",
    ),
    click.option(
        "--acquire-deadline",
        "acquire_deadline_s",
        type=click.FloatRange(0, SECONDS_MAX, min_open=True),
        default=ACQUIRE_DEADLINE_S,
        help="Seconds that opening a chip may take.",
    ),
    click.option(
        "--kv-blocks",
        type=block_counts,
        metavar="N,N,...",
        show_default="what is needed, at most a quarter of the free memory",
        help="Blocks of KV memory: one number for all chips, or one per chip, such as 64,48.",
    ),
)

SETTINGS_FILE_OPTION = click.option(
    "--settings",
    "settings_file",
    type=FILE,
    is_eager=True,
    callback=take_settings,
    metavar="FILE",
    help="File of `polychip calibrate`: its settings hold where their options are not given.",
)
LOG_LEVEL_OPTION = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    help="Least severity that is logged, to standard error.",
)
CAPTURED_TOKENS_OPTION = click.option(
    "--captured-tokens",
    type=click.IntRange(min=0, max=CAPTURED_TOKENS_MAX),
    default=CAPTURED_TOKENS,
    help="Steps of up to so many tokens are captured on chips that can, and replayed; 0: none.",
)

NETWORK_OPTIONS = (
    click.option(
        "--api-key-file", type=FILE, help="File with the keys clients may use, one a line."
    ),
    click.option("--join-token-file", type=FILE, help="File with the secret that admits workers."),
    click.option(
        "--announce",
        type=replaced_file,
        metavar="FILE",
        help="File that receives the ports as JSON.",
    ),
    LOG_LEVEL_OPTION,
    click.option(
        "--debug-backend",
        is_flag=False,
        flag_value="*",
        metavar="[PATTERN]",
        help="Workers log each call of a backend primitive, or of those a pattern such as "
        "'kernels.*' selects.",
    ),
    click.option(
        "--debug-backend-calls",
        type=COUNT,
        default=256,
        help="Calls of primitives a worker keeps and logs at a fault, with --debug-backend.",
    ),
    CAPTURED_TOKENS_OPTION,
)


def serve_options(command: Command) -> Command:
    """Adds every option of `polychip serve`, in the order of docs/settings.md."""
    command = settings.settings_options(settings.FURTHER)(command)
    command = settings.settings_options(settings.REQUESTS)(command)
    command = _with(NETWORK_OPTIONS, command)
    command = settings.settings_options(settings.NETWORK)(command)
    command = settings.settings_options(settings.SCHEDULING)(command)
    command = SETTINGS_FILE_OPTION(command)
    command = settings.settings_options(settings.CHIPS)(command)
    command = _with(CHIP_OPTIONS, command)
    command = settings.settings_options(settings.MODEL)(command)
    return _with(MODEL_OPTIONS, command)


def calibrated_options(command: Command) -> Command:
    """Adds the options of `polychip serve` that say what a step computes, on which chips."""
    command = CAPTURED_TOKENS_OPTION(LOG_LEVEL_OPTION(command))
    table = [each for each in settings.SETTINGS if each.flag in CALIBRATED_SETTINGS]
    command = settings.settings_options(table)(command)
    command = _with(CHIP_OPTIONS, command)
    return _with(MODEL_OPTIONS, command)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
