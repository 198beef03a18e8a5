"""`polychip serve --settings FILE`: what a calibration recommends holds where no option is given.

command line > environment > settings file > default
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from control_plane.errors import ConfigurationError
from scripts.calibration.calibration_file import Calibration, read_calibration
from scripts.settings import ServeSettings


def take_settings(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """The callback of --settings, which click calls before it looks at the other options."""
    del parameter
    if path is not None:
        context.default_map = dict(asdict(_read(path).settings))
    return path


def names_from_file(context: click.Context) -> list[str]:
    """Names of the parameters that the settings file gave."""
    names = [parameter.name or "" for parameter in context.command.params]
    source = context.get_parameter_source
    return [name for name in names if source(name) is ParameterSource.DEFAULT_MAP]


def warnings_of(settings: ServeSettings) -> list[str]:
    """In what the service differs from that for which its settings file was measured.

    Only what is known before the model is read: it says nothing of a file that was replaced.
    """
    if settings.settings_file is None:
        return []
    made_for = _read(settings.settings_file)
    return [
        f"{settings.settings_file} was measured with {option} {theirs}, this service has {own}; "
        "measure again with `polychip calibrate`"
        for option, theirs, own in _differences(made_for, settings)
    ]


def _differences(made_for: Calibration, settings: ServeSettings) -> Sequence[tuple[str, str, str]]:
    """Option, value of the file, value of the service."""
    sizes = zip(settings.backend_of_group, settings.group_sizes, strict=True)
    groups = dict.fromkeys(f"{backend}:{size}" for backend, size in sizes)
    pairs = [
        ("--model", _place(made_for.model), _place(settings.control_plane.model_path)),
        ("--groups", f"{made_for.backend}:{made_for.group_size}", ",".join(groups)),
        ("--weights", made_for.weights, settings.weights),
    ]
    if settings.dtype != "auto":
        pairs.append(("--dtype", made_for.dtype, settings.dtype))
    return [pair for pair in pairs if pair[1] != pair[2]]


def _place(path: str) -> str:
    return str(Path(path).resolve())


def _read(path: Path) -> Calibration:
    try:
        return read_calibration(path)
    except ConfigurationError as error:
        raise click.UsageError(f"--settings {error}") from error
