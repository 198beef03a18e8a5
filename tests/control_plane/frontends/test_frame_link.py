"""The stream between the control plane and a frontend: order, sizes, bounds and ends."""

import socket
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from control_plane.errors import ProtocolError
from control_plane.frontends import frame_link
from control_plane.frontends.frame_link import FrameLink

pytestmark = pytest.mark.anyio


@pytest.fixture
async def links() -> AsyncIterator[tuple[FrameLink, FrameLink]]:
    ours, theirs = socket.socketpair()
    pair = await FrameLink.over(ours), await FrameLink.over(theirs)
    yield pair
    for each in pair:
        each.abort()
        await each.close()


async def taken(link: FrameLink) -> list[bytes]:
    with anyio.fail_after(30):
        return [message async for message in link.messages()]


async def test_messages_of_all_sizes_arrive_in_order_both_ways(links) -> None:
    messages = [b"", b"x", b"y" * 70_000, *(b"%d" % index for index in range(1000))]
    messages.append(b"z" * (1 << 22))
    heard: list[list[bytes]] = []

    async def take(link: FrameLink) -> None:
        taken = []
        async for message in link.messages():
            taken.append(message)
            if len(taken) == len(messages):
                heard.append(taken)
                return

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for link in links:
                tasks.start_soon(take, link)
                for message in messages:
                    link.send(message)
    assert heard == [messages, messages]


async def test_what_was_sent_before_the_close_arrives(links) -> None:
    a, b = links
    a.send(b"last")
    assert not b.other_end_gone
    await a.close()
    assert b.other_end_gone
    assert await taken(b) == [b"last"]
    b.send(b"nobody hears this")
    assert await taken(b) == []


async def test_an_end_that_does_not_read_loses_the_link(links, monkeypatch) -> None:
    a, b = links
    monkeypatch.setattr(frame_link, "BACKLOG_BYTES_MAX", 1 << 20)
    for _ in range(200):
        a.send(b"x" * (1 << 16))
        await anyio.lowlevel.checkpoint()
    assert len(await taken(b)) < 200


async def test_a_message_beyond_the_bound_is_refused(links, monkeypatch) -> None:
    a, b = links
    a.send(b"x" * 100)
    await anyio.lowlevel.checkpoint()
    monkeypatch.setattr(frame_link, "FRAME_BYTES_MAX", 99)
    with pytest.raises(ProtocolError, match="100 bytes; at most 99"):
        await taken(b)
    a.send(b"x" * 100)
    assert await taken(a) == []
