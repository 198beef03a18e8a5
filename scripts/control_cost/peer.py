"""A process at the other end of loopback connections: what it takes itself is not counted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.child_process import quiet_grpc


class PeerFailed(Exception):
    """The process at the other end did not do its part."""


@contextmanager
def peer(module: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Runs `python -m module arguments`, which is killed at the end of the block.

    In a session of its own, so that a Ctrl-C of the terminal reaches only the one that measures.
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=quiet_grpc(os.environ),
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
