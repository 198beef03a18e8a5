"""The address of a control plane that announces its port in a file."""

import json
from pathlib import Path

import anyio

from chip_worker.plane_address import dialled_address


def test_an_address_is_dialled_as_it_is() -> None:
    assert anyio.run(dialled_address, "plane.example:50052") == "plane.example:50052"


def test_a_port_is_waited_for_until_it_is_announced(tmp_path: Path) -> None:
    path = tmp_path / "announce.json"

    async def dial_before_it_is_there() -> str:
        found: list[str] = []

        async def dial() -> None:
            found.append(await dialled_address(f"[::1]:@{path}"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dial)
            await anyio.sleep(0.1)
            assert not found
            unfinished = anyio.Path(tmp_path / "unfinished")
            await unfinished.write_text(json.dumps({"worker_port": 7, "http_port": 8}))
            await unfinished.rename(path)
        return found[0]

    with_port = anyio.run(dial_before_it_is_there)
    assert with_port == "[::1]:7"
