"""Who hears which verdicts: those present, those who come later, those who do not read."""

from collections.abc import AsyncIterator

import anyio
import pytest

from control_plane.intake.verdict_hub import RECENT_MAX, WAITING_MAX, VerdictHub
from control_plane.scheduling.messages import Condemn

pytestmark = pytest.mark.anyio


def condemn(name: str, incarnation: int) -> Condemn:
    return Condemn(name, incarnation, 4711, "frozen")


async def heard(verdicts: AsyncIterator[Condemn], count: int) -> list[Condemn]:
    with anyio.fail_after(30):
        return [await anext(verdicts) for _ in range(count)]


async def test_whoever_watches_anew_hears_the_latest_of_each_worker_first():
    hub = VerdictHub()
    for name, incarnation in (("chip0", 1), ("chip1", 2), ("chip0", 3)):
        hub.publish(condemn(name, incarnation))
    with hub.watching() as verdicts:
        hub.publish(condemn("chip2", 4))
        assert await heard(verdicts, 3) == [
            condemn("chip1", 2),
            condemn("chip0", 3),
            condemn("chip2", 4),
        ]
        hub.close()
        assert [each async for each in verdicts] == []


async def test_what_is_kept_is_bounded():
    hub = VerdictHub()
    for index in range(2 * RECENT_MAX):
        hub.publish(condemn(f"chip{index}", 1))
    with hub.watching() as verdicts:
        for index in range(WAITING_MAX // 2):
            hub.publish(condemn(f"late{index}", 1))
        names = [each.worker_id for each in await heard(verdicts, WAITING_MAX)]
    # The oldest gave way to what came while nobody read.
    kept = [f"chip{index}" for index in range(2 * RECENT_MAX - WAITING_MAX // 2, 2 * RECENT_MAX)]
    assert names == [*kept, *(f"late{index}" for index in range(WAITING_MAX // 2))]
