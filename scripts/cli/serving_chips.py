"""The chips a service is about to use: backends chosen and checked before anything is started.

settings --settle_backends--> no `auto` left --look_at_chips--> descriptions --> chip_table
         --check_groups--> the groups can share the model
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import click

from backends.errors import BackendError
from backends.plugin import AUTO, BackendConfig, ChipDescription, choose_backend, find_backend
from chip_worker.exit_code import ExitCode
from scripts.settings import ServeSettings, worker_id
from scripts.text_table import text_table

Chips = Mapping[str, Sequence[ChipDescription]]
GROUP_CHECK_DEADLINE_S = 60.0
"""It imports torch, which may take long on a busy machine; the workers find out anyway."""


def backend_config(settings: ServeSettings, backend: str) -> BackendConfig:
    """What the workers of one backend tell it, all of them together."""
    options = (text.partition("=") for text in settings.backend_options.get(backend, ()))
    return BackendConfig(
        chip_indices=tuple(range(settings.chips_of(backend))),
        devices=settings.devices.get(backend, ()),
        chips_on_host=settings.chips_of(backend),
        dtype=settings.dtype,
        options={name: value for name, _, value in options},
    )


def settle_backends(settings: ServeSettings) -> tuple[ServeSettings, list[str]]:
    """The settings with `auto` replaced by its choice, and what was tried, for people.

    The choice is made once, here: workers get a name. Raises UsageError if nothing can serve.
    """
    if AUTO not in settings.backends:
        return settings, []
    with _own_environment():
        try:
            choice = choose_backend(backend_config(settings, AUTO))
        except BackendError as error:
            raise click.UsageError(f"--backend {AUTO}: {error}") from error
    lines = [f"backend {name} was not taken: {reason}" for name, reason in choice.rejected]
    return _renamed(settings, choice.name), [*lines, f"backend {choice.name} was taken"]


def _renamed(settings: ServeSettings, name: str) -> ServeSettings:
    """`name` in the place of `auto`; refused where it has groups and lists of its own already."""
    if name in settings.backends:
        raise click.UsageError(
            f"--groups: {AUTO} came to {name}, which other groups name too; name it in all of them"
        )

    def renamed(each: str) -> str:
        return name if each == AUTO else each

    return replace(
        settings,
        backend=renamed(settings.backend),
        group_backends=tuple(renamed(each) for each in settings.group_backends),
        devices={renamed(each): ids for each, ids in settings.devices.items()},
        backend_options={renamed(each): texts for each, texts in settings.backend_options.items()},
    )


def look_at_chips(
    settings: ServeSettings, warn: Callable[[str], None] = lambda _warning: None
) -> Chips:
    """The chips of every backend, as its workers will find them; opens none.

    warn: called with what a backend has to say about their use. Raises UsageError with the
    backend's own error; one that is no BackendError comes as it is.
    """
    found: dict[str, Sequence[ChipDescription]] = {}
    for name in settings.backends:
        config = backend_config(settings, name)
        with _own_environment():
            try:
                backend = find_backend(name)
                backend.on_init(config)
                chips = backend.select_chips(config)
                warnings = backend.warnings(config)
            except (BackendError, ImportError) as error:
                raise click.UsageError(f"--backend {name}: {error}") from error
        if not chips:
            raise click.UsageError(f"--backend {name}: it finds no chip on this machine")
        for warning in warnings:
            warn(f"--backend {name}: {warning}")
        found[name] = chips
    return found


def check_groups(settings: ServeSettings) -> None:
    """Raises UsageError if a group of several chips cannot share the model; takes a second or two.

    Every model can be on one chip.
    """
    sizes = sorted({size for size in settings.group_sizes if size > 1})
    if not sizes:
        return
    config = settings.control_plane
    arguments = [config.model_path, config.kv_policy, *map(str, sizes)]
    command = [sys.executable, "-m", "scripts.group_check", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=GROUP_CHECK_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return
    if done.returncode == ExitCode.MODEL_FAILED:
        raise click.UsageError(f"--groups: {done.stdout.strip()}")


def chip_table(settings: ServeSettings, chips: Chips) -> list[str]:
    """A line a chip: its worker, group, backend, place among the backend's chips, and device."""
    rows = [("worker", "group", "backend", "local index", "device", "description")]
    for place in settings.chip_places():
        there = {chip.index: chip for chip in chips[place.backend]}
        chip = there.get(place.local_index)
        device = chip.known_as if chip is not None else "-"
        about = (
            chip.description if chip is not None else f"not there: {len(there)} chips were found"
        )
        numbers = (f"g{place.group}", place.backend, str(place.local_index))
        rows.append((worker_id(place.index), *numbers, device, about))
    return text_table(rows)


@contextmanager
def _own_environment() -> Iterator[None]:
    """Backends may set variables for their own worker; those of another make must not get them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
