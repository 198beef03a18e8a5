"""Files that commands write: whether they can be written is told before the work begins."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from control_plane.whole_file import try_to_create, try_whole


def output_file(text: str) -> Path:
    """A file in a folder that exists: what was measured for minutes must find its place."""
    path = _in_folder(text)
    with _tried(text):
        # A pipe or a device cannot be tried without effect.
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            try_to_create(Path(os.path.realpath(path)))
    return path


def replaced_file(text: str) -> Path:
    """An output file that is replaced as a whole, if it is there; no device or pipe."""
    path = _in_folder(text)
    with _tried(text):
        try_whole(path)
    return path


def _in_folder(text: str) -> Path:
    path = Path(text)
    with _tried(text):
        if path.is_dir() or not path.parent.is_dir():
            raise click.BadParameter(f"{text!r} is no file in a folder that exists")
    return path


@contextmanager
def _tried(text: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.BadParameter(f"{text!r} cannot be written: {error.strerror}") from error
