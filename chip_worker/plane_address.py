"""Where the control plane is dialled: an address, or one whose port a file will tell.

A worker that is started beside its control plane opens its chip meanwhile, and waits here for it.
"""

import json
from pathlib import Path

import anyio

PORT_OF_FILE = ":@"
"""Between host and file, in place of the colon before a port."""
ANNOUNCE_POLL_S = 0.02


async def dialled_address(control_plane: str) -> str:
    """HOST:PORT of HOST:PORT, or of HOST:@FILE once the control plane is announced there."""
    host, separator, path = control_plane.partition(PORT_OF_FILE)
    if not separator:
        return control_plane
    return f"{host}:{(await announced_ports(path))['worker_port']}"


async def announced_ports(path: str | Path) -> dict[str, int]:
    """What the control plane writes into a file once it listens; waits for it.

    The file is written by rename, so that there is never half of it.
    """
    file = anyio.Path(path)
    # Another process writes it: there is no event to wait for.
    while not await file.exists():  # noqa: ASYNC110
        await anyio.sleep(ANNOUNCE_POLL_S)
    ports: dict[str, int] = json.loads(await file.read_text())
    return ports
