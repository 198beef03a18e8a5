"""JSON for HTTP answers: compact, and never with NaN or Infinity, which are not JSON."""

import json
import math


def dump(content: object) -> bytes:
    """Raises ValueError for numbers that are not finite; see `finite`."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half characters can only come from what a client sent; escaped they are valid JSON.
    return text.encode(errors="backslashreplace")


def finite(value: float) -> float | None:
    """The number, or null where it is none."""
    return value if math.isfinite(value) else None
