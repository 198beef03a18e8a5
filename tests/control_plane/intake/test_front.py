"""The whole intake: how it stops."""

import asyncio
import socket

import anyio
import pytest

from control_plane.intake import front
from tests.control_plane.intake.fake_core import until

pytestmark = pytest.mark.anyio


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_both_ports_are_closed_before_what_is_open_has_ended(start, monkeypatch):
    monkeypatch.setattr(front, "RESPONSES_GRACE_S", 60.0)
    async with start() as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.http_port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert b"100" in await reader.readline()  # somebody reads the body now, which does not come
        stopped = anyio.Event()

        async def stop() -> None:
            await s.intake.stop()
            stopped.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            await until(lambda: not listens(s.grpc_port))
            assert not listens(s.http_port)
            assert not stopped.is_set()
            writer.close()
            await writer.wait_closed()
            with anyio.fail_after(30):
                await stopped.wait()
