"""JSON for HTTP answers: compact, and never with NaN or Infinity, which are not JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence

LINE_BREAKS = {break_: f"\\u{ord(break_):04x}" for break_ in "\x85\u2028\u2029"}
"""No line breaks in JSON or an event stream; but many clients split their lines there."""
SLICE_ENTRIES = 512
"""Entries of a long list that are written in one call of the library, during which no other thread
runs; each may be an object of some twenty entries, so that the call takes a few milliseconds."""


def dump(content: object) -> bytes:
    """Raises ValueError for numbers that are not finite; see `finite`."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        for line_break, escaped in LINE_BREAKS.items():
            text = text.replace(line_break, escaped)
    # Half characters can only come from what a client sent; escaped they are valid JSON.
    return text.encode(errors="backslashreplace")


def dump_long(content: Mapping[str, object]) -> bytes:
    """The same for an object that may hold long lists: a thread that writes it lets others run."""
    return b"".join(_parts(content)) if _is_long(content) else dump(content)


def finite(value: float) -> float | None:
    """The number, or null where it is none."""
    return value if math.isfinite(value) else None


def _is_long(content: object) -> bool:
    if isinstance(content, Mapping):
        return any(map(_is_long, content.values()))
    return isinstance(content, (list, tuple)) and len(content) > SLICE_ENTRIES


def _parts(content: object) -> Iterator[bytes]:
    if not _is_long(content):
        yield dump(content)
    elif isinstance(content, Mapping):
        start = b"{"
        for name, value in content.items():
            yield start + dump(name) + b":"
            yield from _parts(value)
            start = b","
        yield b"}"
    elif isinstance(content, Sequence):
        for first in range(0, len(content), SLICE_ENTRIES):
            yield (b"," if first else b"[") + dump(content[first : first + SLICE_ENTRIES])[1:-1]
        yield b"]"
