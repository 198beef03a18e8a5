"""How often Python looks through everything that lives for garbage that refers to itself.

Such a full collection stops the process for as long as there are objects: 0.2 s with 100,000 cached
blocks. What a step makes is freed without it, but at a hundred groups it lives long enough to count
as old, so that at Python's own pace there would be one in every two thousand steps.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MIDDLE_COLLECTIONS_MIN = 1000
"""Between two full ones; Python's own pace is 10. A middle one looks through the last 8000 objects
or so, and takes a few milliseconds."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Holds for the whole process until the end of the block."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, MIDDLE_COLLECTIONS_MIN)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
