"""Where the control plane is dialled: an address, or one whose port a file will tell.

A worker that is started beside its control plane opens its chip meanwhile, and waits here for it.
"""

import json
from pathlib import Path

import anyio

from chip_worker.errors import Unreachable

PORT_OF_FILE = ":@"
"""Between host and file, in place of the colon before a port."""
ANNOUNCE_POLL_S = 0.02
ANNOUNCE_TIMEOUT_S = 5.0
"""For one attempt to find the port, as for one to attach."""

_REMEDY = "start the control plane with --announce {path}, or give its HOST:PORT"


async def dialled_address(control_plane: str) -> str:
    """HOST:PORT of HOST:PORT, or of HOST:@FILE once the control plane is announced there.

    Raises Unreachable if it is not for a while, or if the file says something else.
    """
    host, separator, path = control_plane.partition(PORT_OF_FILE)
    if not separator:
        return control_plane
    with anyio.move_on_after(ANNOUNCE_TIMEOUT_S):
        return f"{host}:{(await announced_ports(path))['worker_port']}"
    raise Unreachable(
        f"{path} of --control-plane is not there after {ANNOUNCE_TIMEOUT_S:g} s; "
        f"{_REMEDY.format(path=path)}"
    )


async def announced_ports(path: str | Path) -> dict[str, int]:
    """What the control plane writes into a file once it listens; waits for it.

    The file is written by rename, so that there is never half of it. Raises Unreachable if it
    cannot be read, or was written by something else.
    """
    file = anyio.Path(path)
    # Another process writes it: there is no event to wait for.
    while not await file.exists():  # noqa: ASYNC110
        await anyio.sleep(ANNOUNCE_POLL_S)
    try:
        ports = json.loads(await file.read_text())
    except (OSError, ValueError) as error:
        problem = str(error)
    else:
        if isinstance(ports, dict) and isinstance(ports.get("worker_port"), int):
            return ports
        problem = "it has no worker_port"
    raise Unreachable(
        f"{path} is not what a control plane announces: {problem}; {_REMEDY.format(path=path)}"
    )
