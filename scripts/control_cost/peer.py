"""A process at the other end of a connection: what it takes itself is not counted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from scripts.child_process import quiet_grpc


@contextmanager
def peer(module: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Runs `python -m module arguments`, which is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=quiet_grpc(os.environ),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
