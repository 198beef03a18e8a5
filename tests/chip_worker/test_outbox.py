"""Reports on their way out: order kept, acknowledgements together, an overflow told."""

import anyio

from chip_worker.batch import Fault, FaultKind, StepAck, StepTimes
from chip_worker.outbox import MESSAGES_MAX, Outbox

FAULT = Fault(1, 1, 0, FaultKind.PEER, "gone")


def acknowledgement(step_id, epoch=1):
    return StepAck(1, epoch, (StepTimes(step_id),))


def test_what_follows_acknowledgements_does_not_overtake_them():
    async def run():
        outbox = Outbox()
        outbox.put(acknowledgement(1))
        outbox.put(acknowledgement(2))
        outbox.put(acknowledgement(1, epoch=2))
        outbox.put(FAULT)
        outbox.put_goodbye("drained")
        return [await outbox.get() for _ in range(4)]

    first, second, fault, goodbye = anyio.run(run)
    assert [times.step_id for times in first.ack.times] == [1, 2]
    assert (second.ack.group_epoch, len(second.ack.times)) == (2, 1)
    assert fault.fault.message == "gone"
    assert goodbye.goodbye.reason == "drained"


def test_a_message_without_room_is_told():
    async def run():
        outbox = Outbox()
        for _ in range(MESSAGES_MAX):
            outbox.put(FAULT)
        with anyio.move_on_after(0.05) as full:
            await outbox.wait_overflowed()
        outbox.put(FAULT)
        with anyio.fail_after(1.0):
            await outbox.wait_overflowed()
        return full.cancelled_caught

    assert anyio.run(run), "a full queue has lost nothing yet"
