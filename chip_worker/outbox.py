"""Messages on their way to the control plane over one stream, acknowledgements put together."""

import asyncio

from chip_worker.batch import Report, StepAck, StepTimes
from chip_worker.wire import encode_goodbye, encode_report
from protos import worker_pb2

MESSAGES_MAX = 1024
ACKNOWLEDGED_STEPS_MAX = 16
ACKNOWLEDGEMENT_DELAY_S = 0.05


class Outbox:
    """Bounded queue of one stream; all methods on the connection's event loop."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[worker_pb2.AttachRequest] = asyncio.Queue(MESSAGES_MAX)
        self._times: list[StepTimes] = []
        self._acknowledged: StepAck | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._overflowed = asyncio.Event()

    def put(self, report: Report) -> None:
        """Queues a report behind all before it.

        Acknowledgements wait a little for each other: nobody waits for them.
        """
        if not isinstance(report, StepAck):
            self._flush()
            self._put(encode_report(report))
            return
        last = self._acknowledged
        if last is not None and (last.term, last.epoch) != (report.term, report.epoch):
            self._flush()
        self._acknowledged = report
        self._times.extend(report.times)
        if len(self._times) >= ACKNOWLEDGED_STEPS_MAX:
            self._flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(ACKNOWLEDGEMENT_DELAY_S, self._flush)

    def put_goodbye(self, reason: str) -> None:
        """Queues the last message of the stream."""
        self._flush()
        self._put(encode_goodbye(reason))

    async def get(self) -> worker_pb2.AttachRequest:
        """The next message, waited for."""
        return await self._messages.get()

    async def wait_overflowed(self) -> None:
        """Returns once a message found no room: the stream has a hole and must end."""
        await self._overflowed.wait()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        last, self._acknowledged = self._acknowledged, None
        times, self._times = tuple(self._times), []
        if last is not None:
            self._put(encode_report(StepAck(last.term, last.epoch, times)))

    def _put(self, message: worker_pb2.AttachRequest) -> None:
        try:
            self._messages.put_nowait(message)
        except asyncio.QueueFull:
            self._overflowed.set()
