"""JSON for HTTP answers: compact, and never with NaN or Infinity, which are not JSON."""

import json
import math

LINE_BREAKS = {break_: f"\\u{ord(break_):04x}" for break_ in "\x85\u2028\u2029"}
"""No line breaks in JSON or an event stream; but many clients split their lines there."""


def dump(content: object) -> bytes:
    """Raises ValueError for numbers that are not finite; see `finite`."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        for line_break, escaped in LINE_BREAKS.items():
            text = text.replace(line_break, escaped)
    # Half characters can only come from what a client sent; escaped they are valid JSON.
    return text.encode(errors="backslashreplace")


def finite(value: float) -> float | None:
    """The number, or null where it is none."""
    return value if math.isfinite(value) else None
