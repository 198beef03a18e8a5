"""What commands that measure share: numbers, tables, JSON, a picture, and an end by Ctrl-C."""

import asyncio
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from scripts.cli.interruption import EXIT_INTERRUPTED
from scripts.cli.output_files import output_file

WIDTH_ELSEWHERE = 200
"""Columns of the table where no terminal says how many there are."""
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
STANDARD_OUTPUT = "-"
DROPPED_INTERRUPT_S = 0.01
"""After so long an interrupt that Python dropped is raised once more."""

Command = TypeVar("Command", bound=Callable[..., Any])


def numbers_up_to(most: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers with commas between them, each from 1 to `most`; repeats count once."""

    def numbers(text: str) -> tuple[int, ...]:
        found = []
        for part in text.split(","):
            if not part.strip().isdecimal() or not 1 <= int(part) <= most:
                raise click.BadParameter(
                    f"{part.strip()!r} is no whole number from 1 to {most}; give such numbers with "
                    "commas between them"
                )
            found.append(int(part))
        return tuple(dict.fromkeys(found))

    return numbers


def json_target(text: str) -> str:
    """A file that can be written, or - for standard output."""
    if "://" in text:
        raise click.BadParameter(
            f"{text!r} is an address, not a file; write --json behind the addresses, or --json=FILE"
        )
    if text != STANDARD_OUTPUT:
        output_file(text)
    return text


def plot_file(text: str) -> Path:
    """A file whose name says a format that can be drawn."""
    if Path(text).suffix not in PLOT_SUFFIXES:
        raise click.BadParameter(f"{text!r} does not end in one of {', '.join(PLOT_SUFFIXES)}")
    return output_file(text)


def output_options(command: Command) -> Command:
    """Adds --json and --plot, in this order."""
    plot = click.option(
        "--plot",
        "plot_path",
        type=plot_file,
        metavar="FILE.png",
        help="Draw the figures (png, svg or pdf); needs matplotlib.",
    )
    return json_option(plot(command))


def json_option(command: Command) -> Command:
    """Adds --json."""
    return click.option(
        "--json",
        "json_path",
        type=json_target,
        is_flag=False,
        flag_value=STANDARD_OUTPUT,
        metavar="[FILE]",
        help="Print JSON instead of tables, or write it to a file beside.",
    )(command)


def drawing(module: str) -> Callable[..., None]:
    """`draw` of a module that is loaded where a picture is asked for: matplotlib is an extra."""
    try:
        draw: Callable[..., None] = importlib.import_module(module).draw
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"--plot needs matplotlib: {sys.executable} -m pip install matplotlib"
        ) from error
    return draw


def tables_console() -> Console:
    """Standard output, for tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_ELSEWHERE
    return console


def put_out(content: str, json_path: str | None, show: Callable[[], None]) -> None:
    """What was measured: JSON in place of the tables that `show` prints, or in a file beside."""
    if json_path == STANDARD_OUTPUT:
        click.echo(content)
        return
    show()
    if json_path is not None:
        with unwritable():
            Path(json_path).write_text(content + "\n")


@contextmanager
def unwritable() -> Iterator[None]:
    """A file that cannot be written is an error of the command."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def ends_at_interrupt() -> Iterator[None]:
    """Ctrl-C ends the command, and says that nothing is shown."""
    try:
        with _interrupt_comes_again():
            yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("Interrupted; nothing is shown of what was measured.", err=True)
        sys.exit(EXIT_INTERRUPTED)


@contextmanager
def _interrupt_comes_again() -> Iterator[None]:
    """Python drops a KeyboardInterrupt that rises while it clears something away."""
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def raise_later(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, DROPPED_INTERRUPT_S)
        else:
            hook(unraisable)

    sys.unraisablehook = raise_later
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        sys.unraisablehook = hook
