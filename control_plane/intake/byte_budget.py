"""Counts what requests hold before they are admitted, so that clients together cannot fill memory.

servers --ReadBudget--> what is being read        TokenizerPool --ByteBudget--> work for threads
"""

import sys
import threading
from collections.abc import Mapping

from control_plane.errors import RETRY_AFTER_S, QueueFull


class ReadBudget:
    """Bytes of requests as they came, of both protocols; for the event loop's thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    def check(self, bytes_count: int) -> None:
        """Raises QueueFull, with a retry hint, if so many more are too many."""
        if self._bytes + bytes_count > self._bytes_max:
            raise QueueFull(
                f"requests of {self._bytes} bytes are being read, and with this one they would "
                f"exceed {self._bytes_max}: try again in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    def take(self, bytes_count: int) -> None:
        """Counts them until they are released. Raises QueueFull likewise."""
        self.check(bytes_count)
        self._bytes += bytes_count

    def release(self, bytes_count: int) -> None:
        """Gives back what `take` counted."""
        self._bytes -= bytes_count


class ByteBudget:
    """Bytes and pieces of work held at once; may be used from any thread."""

    def __init__(self, *, bytes_max: int, pieces_max: int) -> None:
        self._bytes_max = bytes_max
        self._pieces_max = pieces_max
        self._bytes = 0
        self._pieces = 0
        self._lock = threading.Lock()

    def take(self, bytes_count: int) -> None:
        """Counts one piece of work; raises QueueFull, with a retry hint, if it is too much."""
        with self._lock:
            if self._pieces >= self._pieces_max:
                raise QueueFull(
                    f"{self._pieces} prompts wait to be tokenized, and no more may: try again in "
                    f"{RETRY_AFTER_S:g} s",
                    retry_after_s=RETRY_AFTER_S,
                )
            # A single piece over the limit is let in when nothing else is: it would never be.
            if self._pieces and self._bytes + bytes_count > self._bytes_max:
                raise QueueFull(
                    f"prompts of {self._bytes} bytes wait to be tokenized, and with this one "
                    f"they would exceed {self._bytes_max}: try again in {RETRY_AFTER_S:g} s",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._pieces += 1
            self._bytes += bytes_count

    def release(self, bytes_count: int) -> None:
        """Gives back what one `take` counted."""
        with self._lock:
            self._pieces -= 1
            self._bytes -= bytes_count


def bytes_of(value: object) -> int:
    """Memory of the texts and numbers in a value of JSON's kinds."""
    total = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        total += sys.getsizeof(each)
        if isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
    return total
