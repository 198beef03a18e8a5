"""One child process of the launcher: started in a session of its own, ended within a bound."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from subprocess import DEVNULL

import anyio
from anyio.abc import Process

from control_plane.child_processes import STANDARD_ERROR


async def start_child(command: list[str]) -> Process:
    """Starts a child; what it prints goes to our standard error.

    In a session of its own, so that a Ctrl-C of the terminal reaches only the launcher.
    """
    return await anyio.open_process(
        command,
        stdin=DEVNULL,
        stdout=STANDARD_ERROR,
        stderr=None,
        env=quiet_grpc(os.environ),
        start_new_session=True,
    )


def quiet_grpc(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which gRPC's C core prints nothing: what matters, we say ourselves."""
    return {"GRPC_VERBOSITY": "NONE", **environment}


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signals a child that may have ended already."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)


async def end_child(process: Process, grace_s: float) -> None:
    """SIGTERM, and SIGKILL for a child that does not end within `grace_s`."""
    send_signal(process, signal.SIGTERM)
    with anyio.move_on_after(grace_s):
        await process.wait()
    send_signal(process, signal.SIGKILL)
    await process.wait()


def describe_exit(code: int) -> str:
    """An exit status in words: negative means a signal, as Python has it."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
