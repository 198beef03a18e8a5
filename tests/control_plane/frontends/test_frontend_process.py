"""What a frontend does with its stream, from the first message to the last."""

import socket

import anyio
import pytest

from control_plane.config import ControlPlaneConfig
from control_plane.frontends import __main__ as frontend
from control_plane.frontends import wire
from control_plane.frontends.frame_link import FrameLink
from control_plane.intake.front import Intake, IntakePorts
from control_plane.scheduling.messages import ServingChanged
from scripts.topology import default_model_path

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("lives", [True, False])
async def test_no_port_is_opened_for_a_control_plane_that_is_gone(lives, monkeypatch):
    opened: list[Intake] = []

    async def start(self, _tasks) -> IntakePorts:
        opened.append(self)
        await link.close()
        return IntakePorts(1, 2)

    monkeypatch.setattr(Intake, "start", start)
    ours, theirs = socket.socketpair()
    link = await FrameLink.over(ours)
    config = ControlPlaneConfig(str(default_model_path()), frontends=1, http_port=0, grpc_port=0)
    link.send(wire.start_message(config))
    link.send(wire.effect_message(ServingChanged(("g0",))).SerializeToString())
    if not lives:
        await link.close()
    with anyio.fail_after(60):
        await frontend.serve(theirs)
    assert len(opened) == lives
