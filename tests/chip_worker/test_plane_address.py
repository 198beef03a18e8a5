"""The address of a control plane that announces its port in a file."""

import json
from pathlib import Path

import anyio
import pytest

from chip_worker import plane_address
from chip_worker.errors import Unreachable
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


def test_a_port_that_is_not_announced_is_told_after_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plane_address, "ANNOUNCE_TIMEOUT_S", 0.05)
    path = tmp_path / "announce.json"
    with pytest.raises(Unreachable, match=rf"{path} .* not there .* --announce {path}"):
        anyio.run(dialled_address, f"127.0.0.1:@{path}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode byte"),
        (b"[7]", "no worker_port"),
        (b'{"http_port": 8}', "no worker_port"),
        (b'{"worker_port": "7"}', "no worker_port"),
    ],
)
def test_a_file_of_something_else_is_named_with_the_remedy(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "announce.json"
    path.write_bytes(content)
    with pytest.raises(Unreachable, match=rf"{path} is not .*{problem}.*--announce {path}"):
        anyio.run(dialled_address, f"127.0.0.1:@{path}")
