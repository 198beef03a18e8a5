"""`python -m control_plane.frontends`: one frontend, started by the control plane and no one else.

Takes its settings and ends by the stream it was started with: when that ends, the control plane is
gone, so open calls are answered with an error, and the process ends too.
"""

import logging
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import click
import structlog
from anyio.abc import TaskGroup

from control_plane.errors import ConfigurationError
from control_plane.frontends import wire
from control_plane.frontends.frame_link import FrameLink
from control_plane.frontends.remote_core import RemoteCore
from control_plane.full_collections import rare_full_collections
from control_plane.intake.front import Intake
from control_plane.intake.model_files import load_intake_model
from control_plane.logs import configure_logging
from control_plane.metrics import Metrics
from control_plane.processors import THREAD_SWITCH_S
from protos import frontend_pb2

STOP_S = 3.5
"""Most time open calls and the servers may take to end."""
LEAVE_S = 1.0
"""Most time the control plane may take to read the last of it; with STOP_S less than it waits for
this process to end (see front_processes.py)."""
CONTROL_PLANE_GONE = "frontend.control_plane_gone"

_log = structlog.get_logger()


@click.command()
@click.option("--link", "descriptor", type=int, required=True, help="Socket to the control plane.")
@click.option("--name", required=True, help="What the log calls it.")
@click.option("--log-level", type=int, default=logging.INFO, help="Least severity, as a number.")
def command(descriptor: int, name: str, log_level: int) -> None:
    """Take requests for the control plane that started this process."""
    configure_logging(logging.getLevelName(log_level).lower())
    structlog.contextvars.bind_contextvars(frontend=name)
    sys.setswitchinterval(THREAD_SWITCH_S)
    with rare_full_collections():
        anyio.run(serve, socket.socket(fileno=descriptor))


async def serve(end: socket.socket) -> None:
    """Serves until the control plane says Stop or is gone."""
    link = await FrameLink.over(end)
    metrics = Metrics()
    core = RemoteCore(link, metrics.requests_text)
    messages = link.messages()
    async for data in messages:
        start = frontend_pb2.ToFrontend.FromString(data).start
        try:
            config = wire.config_of(start)
            model = load_intake_model(config)
            intake = Intake(config, model, core.post, core, time.monotonic, metrics=metrics)
        except ConfigurationError as error:
            core.start_refused(str(error))
        else:
            core.front = intake
            await _serve_clients(intake, core, link, messages)
        break
    with suppress(TimeoutError), anyio.fail_after(LEAVE_S):
        core.report()
        await link.close()


async def _serve_clients(
    intake: Intake, core: RemoteCore, link: FrameLink, messages: AsyncIterator[bytes]
) -> None:
    async for data in messages:
        # Which groups serve: known before anybody can ask.
        core.take(frontend_pb2.ToFrontend.FromString(data))
        break
    async with anyio.create_task_group() as tasks:
        # Loading the model took a while: the control plane may be gone, its ports another's.
        if link.other_end_gone:
            reason = _gone()
        else:
            reason = await _listen(intake, core, messages, tasks)
        core.close()
        with anyio.move_on_after(STOP_S):
            await intake.stop(reason)
        tasks.cancel_scope.cancel()


async def _listen(
    intake: Intake, core: RemoteCore, messages: AsyncIterator[bytes], tasks: TaskGroup
) -> str:
    """Takes clients; returns why the service is over."""
    try:
        await intake.start(tasks)
    except ConfigurationError as error:
        core.start_refused(str(error))
        return str(error)
    core.listening()
    return await _follow(core, messages)


async def _follow(core: RemoteCore, messages: AsyncIterator[bytes]) -> str:
    """Takes what the control plane says; returns why the service is over."""
    async for data in messages:
        message = frontend_pb2.ToFrontend.FromString(data)
        if message.HasField("stop"):
            return message.stop.reason
        core.take(message)
    return _gone()


def _gone() -> str:
    _log.error(CONTROL_PLANE_GONE)
    return "the control plane is gone; come back in a moment"


if __name__ == "__main__":
    command.main(prog_name="polychip frontend")
