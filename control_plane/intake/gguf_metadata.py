"""Reads the key-value section of a GGUF file and nothing else; intake needs no tensors.

The reader of the `gguf` package makes two arrays per string, seconds for a vocabulary; here a
string is one slice, so the whole section of a 50 k vocabulary takes a tenth of a second.
"""

import mmap
import struct
from pathlib import Path

from control_plane.errors import ConfigurationError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING = 8
ARRAY = 9
SCALAR_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
LENGTH = struct.Struct("<Q")

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]


def read_gguf_metadata(path: Path) -> dict[str, Value]:
    """Every metadata key with its value as plain Python; nested arrays come flattened.

    Raises ConfigurationError naming the file when it is missing, cut short or not GGUF.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ):
            return _Cursor(view).metadata(path)
    except OSError as error:
        raise ConfigurationError(f"model file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"model file {path}: a string is not UTF-8: {error}") from error
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise ConfigurationError(
            f"model file {path}: its metadata is cut short or damaged ({error}); fetch it again"
        ) from error


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._offset = 0

    def metadata(self, path: Path) -> dict[str, Value]:
        magic = self._view[:4]
        if magic != MAGIC:
            raise ConfigurationError(
                f"model file {path}: not a GGUF file (it begins with {magic!r}, not {MAGIC!r})"
            )
        self._offset = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ConfigurationError(
                f"model file {path}: GGUF version {version} is not supported; versions 2 and 3 in "
                "little-endian order are"
            )
        self._scalar("Q")  # number of tensors
        fields: dict[str, Value] = {}
        for _ in range(int(self._scalar("Q"))):
            key = self._string()
            fields[key] = self._value(int(self._scalar("I")))
        return fields

    def _value(self, kind: int) -> Value:
        if kind == ARRAY:
            return self._array()
        return self._string() if kind == STRING else self._scalar(SCALAR_FORMATS[kind])

    def _array(self) -> list[Scalar]:
        kind = int(self._scalar("I"))
        count = int(self._scalar("Q"))
        if count > len(self._view):
            raise ValueError(f"an array of {count} elements is longer than the file")
        if kind == STRING:
            return self._strings(count)
        if kind == ARRAY:
            return [value for _ in range(count) for value in self._array()]
        layout = f"<{count}{SCALAR_FORMATS[kind]}"
        values = struct.unpack_from(layout, self._view, self._offset)
        self._offset += struct.calcsize(layout)
        return list(values)

    def _strings(self, count: int) -> list[Scalar]:
        """The hot loop: everything local, one slice and one decode a string."""
        view, offset, unpack = self._view, self._offset, LENGTH.unpack_from
        strings: list[Scalar] = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(view, offset)[0]
            strings.append(view[start:offset].decode())
        if offset > len(view):
            raise ValueError("the file ends inside a string")
        self._offset = offset
        return strings

    def _string(self) -> str:
        return str(self._strings(1)[0])

    def _scalar(self, letter: str) -> int | float | bool:
        layout = f"<{letter}"
        (value,) = struct.unpack_from(layout, self._view, self._offset)
        self._offset += struct.calcsize(layout)
        return value  # type: ignore[no-any-return]
