"""`polychip plan`: which layout to serve a model with, what fits, and how fast it may be.

options --> backend (no torch) --> needs, measured in a process of its own --> plan --> report
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from backends.errors import BackendError
from backends.plugin import Backend, BackendConfig, ready_backend
from control_plane.errors import ConfigurationError
from control_plane.settings import DEFAULTS, SETTINGS
from scripts.calibration.calibration_file import (
    CalibratedSettings,
    Calibration,
    read_calibration,
)
from scripts.cli.chip_options import device_lists, options_of
from scripts.cli.serve_options import COUNT, FILE, MODEL_OPTIONS
from scripts.planning.advice import Advice, Shortage
from scripts.planning.capacity import Wishes
from scripts.planning.layouts import layouts, powers_of_two
from scripts.planning.measured import NotMeasured, measure_needs
from scripts.planning.needs import Chips, ModelNeeds, Task
from scripts.planning.plan import Plan, make_plan, shortage_of
from scripts.planning.report import advice_lines, plan_lines, plan_values, shortage_lines
from scripts.planning.speed import why_useless
from scripts.topology import numa_nodes_count

CHIPS_TO_BUY = 8
CHIPS_MAX = 1024
LARGER_FACTOR = 8
"""Groups of up to so many times the chips there are looked at as a remedy."""
FEWER_BITS = ("int8", "native")
"""Values of --weights that are looked at as a remedy."""
UNITS = {"": 1, "b": 1}
UNITS |= {f"{sign}{unit}": 1 << 10 * n for n, sign in enumerate("kmgt", 1) for unit in ("", "ib")}
UNITS |= {f"{sign}b": 1000**n for n, sign in enumerate("kmgt", 1)}
CHIP_BYTES_MIN = 1 << 20
"""Less is a forgotten unit: no model is as small."""
OF_SERVE = ("context_tokens", "block_tokens", "chunk_tokens", "running_max")
"""Settings of `serve` that decide what a layout holds."""

Command = TypeVar("Command", bound=Callable[..., object])


def memory_bytes(text: str) -> int:
    """A size such as 24GiB, 24G (the same), 80GB or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?(?:i?b)?)\s*", text.lower())
    unit = UNITS.get(found[2]) if found else None
    if found is None or unit is None:
        raise click.BadParameter(f"{text!r} is not a size; write one such as 24GiB or 80GB")
    size = int(float(found[1]) * unit)
    if size < CHIP_BYTES_MIN:
        raise click.BadParameter(
            f"{text!r} is {size} bytes, and a chip has at least {CHIP_BYTES_MIN}; write the unit "
            f"too, such as {found[1]}GiB"
        )
    return size


def settings_of_serve(command: Command) -> Command:
    """Adds the options of `serve` that count here, with its own defaults."""
    for setting in reversed([each for each in SETTINGS if each.field in OF_SERVE]):
        command = setting.add_to(command)
    return command


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@MODEL_OPTIONS[0]
@MODEL_OPTIONS[1]
@MODEL_OPTIONS[2]
@click.option(
    "--backend",
    default="cpu",
    envvar="POLYCHIP_BACKEND",
    show_envvar=True,
    help="Make of the chips: NAME, NAME:VARIANT, or auto for the first that can serve here.",
)
@click.option(
    "--backend-option",
    "backend_options",
    multiple=True,
    metavar="NAME=VALUE",
    show_default="none",
    help="Setting of the backend; may be repeated.",
)
@click.option("--devices", metavar="ID,ID,...", help="Ids or names of the chips; all without it.")
@click.option(
    "--chips",
    "chips_count",
    type=click.IntRange(1, CHIPS_MAX),
    show_default=f"those there are, on CPU one per NUMA node; {CHIPS_TO_BUY} with --chip-memory",
    help="Chips to plan for.",
)
@click.option(
    "--chip-memory",
    "chip_bytes",
    type=memory_bytes,
    metavar="SIZE",
    show_default="what is free on the chips at hand",
    help="Memory each chip has to itself, such as 24GiB, for chips that are not there yet.",
)
@settings_of_serve
@click.option(
    "--requests",
    "requests_min",
    type=COUNT,
    default=1,
    help="Requests of full length that a group must hold at once.",
)
@click.option(
    "--calibration",
    "calibration_path",
    type=FILE,
    help="File that `polychip calibrate` wrote: speeds are planned too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def plan(
    *,
    model_path: Path,
    dtype: str,
    weights: str,
    backend: str,
    backend_options: tuple[str, ...],
    devices: str | None,
    chips_count: int | None,
    chip_bytes: int | None,
    requests_min: int,
    calibration_path: Path | None,
    as_json: bool,
    **settings: int | None,
) -> None:
    """Plans which layout to serve a model with, before anything is bought or started.

    Shows for groups of every size what fits: weights, KV, requests; with a calibration how fast
    they may be. Then advises one and prints the command that starts it. Exit status 1 if nothing
    fits.
    """
    calibration = None if calibration_path is None else calibrated(calibration_path)
    source = click.get_current_context().get_parameter_source
    for each in fields(CalibratedSettings):
        if source(each.name) is ParameterSource.DEFAULT:
            settings[each.name] = None
    name, found, config = find_backend_of(
        backend, devices, backend_options, chips_count, dtype, at_hand=chip_bytes is None
    )
    count = config.chips_on_host if chip_bytes is None else chips_count or CHIPS_TO_BUY
    task = Task(
        model=str(model_path.absolute()),
        weights=weights,
        dtype=dtype,
        backend=name,
        devices=config.devices,
        chips_on_host=config.chips_on_host,
        # As a group does that forms of such chips.
        block_tokens=math.lcm(
            settings["block_tokens"] or 1, found.capabilities.block_tokens_multiple
        ),
        sizes=(),
        options=config.options,
    )
    question = Question(
        task, count, chip_bytes, settings, requests_min, found.capabilities.rows_max
    )
    try:
        made = question.answer(calibration)
    except NotMeasured as error:
        raise click.ClickException(str(error)) from error
    command = None
    end: Advice | Shortage
    if made.advice is not None:
        end = made.advice
        command = serve_command(model_path, question, made)
        lines = advice_lines(made, made.advice, command)
    else:
        end = shortage_of(made, fewer_bits(question, made.wishes))
        lines = shortage_lines(made, end)
    if as_json:
        click.echo(json.dumps(plan_values(made, end, command), indent=2))
    else:
        for line in (*plan_lines(made), *lines):
            click.echo(line)
    sys.exit(0 if made.advice is not None else 1)


def calibrated(path: Path) -> Calibration:
    """The calibration. Raises UsageError saying what is wrong with the file."""
    try:
        return read_calibration(path)
    except ConfigurationError as error:
        raise click.UsageError(f"--calibration {error}") from error


def find_backend_of(
    name: str,
    devices: str | None,
    backend_options: tuple[str, ...],
    chips_count: int | None,
    dtype: str,
    *,
    at_hand: bool,
) -> tuple[str, Backend, BackendConfig]:
    """The backend, its name, and what it is told, which chips are planned for among it.

    Opens no chip. at_hand: all chips must be there; else one is enough, to know what it holds.
    Raises UsageError with the backend's own error, or for more chips than there are.
    """
    ids = () if devices is None else device_lists(devices).get("", ())
    if devices is not None and not ids:
        raise click.UsageError("--devices: plan is for one backend, so write ids alone: 0,1,5")
    asked = (chips_count if at_hand else 1) or len(ids) or numa_nodes_count()
    config = BackendConfig(
        chip_indices=(),
        devices=ids,
        chips_on_host=asked,
        dtype=dtype,
        options=options_of(name, backend_options),
    )
    try:
        found = ready_backend(name, config)
        name, backend = found.name, found.backend
        there = len(backend.select_chips(config))
    except (BackendError, ImportError) as error:
        raise click.UsageError(f"--backend {name}: {error}") from error
    if not there:
        raise click.UsageError(
            f"--backend {name}: it finds no chip on this machine, and one is asked what it takes "
            "to hold a model; with --chip-memory, plan for chips of --backend cpu"
        )
    if at_hand and there < (chips_count or 1):
        raise click.UsageError(
            f"--chips is {chips_count}, and backend {name} finds {there}; ask for fewer, or plan "
            "for chips that are not there with --chip-memory"
        )
    return name, backend, replace(config, chips_on_host=chips_count or there) if at_hand else config


@dataclass(frozen=True)
class Question:
    """What is to be planned. settings: those of `serve` in OF_SERVE, as they were asked for.

    task: without the sizes of groups. chip_bytes: None for what the chips at hand have. rows_max:
    most requests the chips compute at once.
    """

    task: Task
    chips_count: int
    chip_bytes: int | None
    settings: Mapping[str, int | None]
    requests_min: int
    rows_max: int

    def answer(self, calibration: Calibration | None) -> Plan:
        """Measures the needs and makes the plan. Raises NotMeasured, or UsageError."""
        count = self.chips_count
        sizes = {layout.size for layout in layouts(count)}
        if calibration is not None:
            sizes.add(calibration.group_size)
        larger = set(powers_of_two(count + 1, LARGER_FACTOR * count)) - sizes
        task = replace(self.task, sizes=tuple(sorted(sizes)), larger_sizes=tuple(sorted(larger)))
        model, chips = measure_needs(task)
        if self.chip_bytes is not None:
            chips = replace(
                chips,
                count=count,
                at_hand=False,
                free_bytes=self.chip_bytes,
                shared=False,
                process_bytes=0,
            )
        return make_plan(model, chips, self._wishes(model, chips, calibration), calibration)

    def _wishes(self, model: ModelNeeds, chips: Chips, calibration: Calibration | None) -> Wishes:
        """Settings that were not asked for are as a calibration of these chips recommends."""
        chosen: dict[str, Any] = {name: DEFAULTS[name] for name in OF_SERVE}
        if calibration is not None and why_useless(calibration, model, chips) is None:
            chosen |= asdict(calibration.settings)
        chosen |= {name: value for name, value in self.settings.items() if value is not None}
        context_tokens = chosen["context_tokens"] or model.context_tokens
        running_max = min(chosen["running_max"], self.rows_max)
        if self.requests_min > running_max:
            raise click.UsageError(
                f"--requests is {self.requests_min}, and a group computes {running_max} at most; "
                "ask for fewer, or raise --max-running"
            )
        return Wishes(
            context_tokens=min(context_tokens, model.context_tokens),
            block_tokens=self.task.block_tokens,
            chunk_tokens=chosen["chunk_tokens"],
            running_max=running_max,
            requests_min=self.requests_min,
        )


def fewer_bits(question: Question, wishes: Wishes) -> dict[str, Plan]:
    """Plans for the same wishes with other values of --weights, as far as chips can hold such."""
    plans: dict[str, Plan] = {}
    # A calibration is of one form of the weights, but what it made a wish of stays one.
    settings = {name: getattr(wishes, name) for name in OF_SERVE}
    for weights in FEWER_BITS:
        if weights == question.task.weights:
            continue
        try:
            task = replace(question.task, weights=weights)
            plans[weights] = replace(question, task=task, settings=settings).answer(None)
        except NotMeasured:
            # These chips have no kernels for such weights: no remedy.
            continue
    return plans


def serve_command(model_path: Path, question: Question, made: Plan) -> str:
    """What to type to serve as advised; only options that differ from their defaults."""
    assert made.advice is not None
    task, advice, layout = question.task, made.advice, made.advice.taken.layout
    words = ["polychip", "serve", "--model", str(model_path)]
    for flag, value, default in (
        ("--backend", task.backend, "cpu"),
        ("--dtype", task.dtype, "auto"),
        ("--weights", task.weights, "auto"),
    ):
        words += [] if value == default else [flag, value]
    for option, value in task.options.items():
        words += ["--backend-option", f"{option}={value}"]
    if task.devices:
        words += ["--devices", ",".join(task.devices[: layout.chips_used])]
    if layout.size == 1:
        words += ["--chips", str(layout.groups)]
    else:
        words += ["--groups", ",".join([str(layout.size)] * layout.groups)]
        words += [] if advice.policy == DEFAULTS["kv_policy"] else ["--kv-policy", advice.policy]
    if advice.kv_blocks is not None:
        words += ["--kv-blocks", str(advice.kv_blocks)]
    # The context only if it was asked for: else it is the model's in both.
    planned = {**asdict(made.wishes), "context_tokens": question.settings["context_tokens"]}
    for setting in SETTINGS:
        if setting.field in OF_SERVE and planned[setting.field] != DEFAULTS[setting.field]:
            words += [setting.flag, str(planned[setting.field])]
    return shlex.join(words)
