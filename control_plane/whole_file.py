"""Writes a file so that who reads it never sees half of it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes the file, in UTF-8, whole or not at all; a symbolic link stays and leads to it.

    Raises OSError naming `path`, also where there is something that is no regular file: a device
    is not to be replaced by a file.
    """
    with _naming(path):
        target = _replaceable(path)
        partial = _partial(target)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def try_whole(path: Path) -> None:
    """Raises the OSError that `write_whole` would, as far as can be told without writing."""
    with _naming(path):
        partial = _partial(_replaceable(path))
        # Left by a process of this number that was killed.
        partial.unlink(missing_ok=True)
        try_to_create(partial)


def try_to_create(path: Path) -> None:
    """Raises OSError if there can be no new file at `path`; there is none afterwards."""
    with path.open("xb"):
        path.unlink()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors name the path that was given, not that of a file beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def _replaceable(path: Path) -> Path:
    """The file that a path leads to."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return Path(os.path.realpath(path))
