"""Workers without chips, in a process of their own: they answer every step at once.

python -m scripts.control_cost.echoing_workers PORT COUNT
"""

import os
import sys

import anyio
from typing_extensions import override

from chip_worker.batch import Command, FormGroup, RowResult, Shutdown, Step, StepResult, StepTimes
from chip_worker.config import WorkerConfig
from chip_worker.errors import WorkerError
from chip_worker.inbox import Inbox
from chip_worker.plane_stream import PlaneStream
from chip_worker.wire import Identity

CONTEXT_TOKENS = 1 << 20
VOCABULARY_SIZE = 32_000


class EchoingInbox(Inbox):
    """Takes a step and puts its result where the stream sends from."""

    def __init__(self) -> None:
        super().__init__(interrupt=lambda _: None)
        self.stream: PlaneStream | None = None

    @override
    def offer(self, command: Command) -> None:
        if isinstance(command, FormGroup):
            super().offer(command)
        assert self.stream is not None, "nothing is offered before it"
        if isinstance(command, Shutdown):
            self.stream.outbox.put_goodbye(command.reason)
        if not isinstance(command, Step):
            return
        rows = tuple(RowResult((row.slot,), ()) for row in command.rows if row.sampled)
        times = StepTimes(command.step_id, device_ns=1)
        self.stream.outbox.put(
            StepResult(command.term, command.epoch, command.step_id, rows, times)
        )


async def serve(port: int, index: int) -> None:
    """One worker, until its stream ends."""
    identity = Identity(
        worker_id=f"chip{index}",
        incarnation=1,
        pid=os.getpid(),
        backend="simulated",
        chip_index=index,
        chip_description="simulated",
        memory_bytes=0,
        dtype="float32",
        batch_invariant=True,
        block_tokens_multiple=1,
        model_name="",
        architecture="",
        model_digest="",
        context_tokens=CONTEXT_TOKENS,
        vocabulary_size=VOCABULARY_SIZE,
    )
    inbox = EchoingInbox()
    config = WorkerConfig(identity.worker_id, f"127.0.0.1:{port}", "")
    stream = inbox.stream = PlaneStream(config, config.control_plane, identity, inbox)
    try:
        await stream.attach(term_highest=0)
        inbox.begin_term(stream.term)
        await stream.serve(alive=lambda: None)
    except WorkerError as ended:
        print(f"chip{index}: {ended}", file=sys.stderr)
    finally:
        await stream.close()


async def serve_all(port: int, count: int) -> None:
    """So many workers at once."""
    async with anyio.create_task_group() as tasks:
        for index in range(count):
            tasks.start_soon(serve, port, index)


if __name__ == "__main__":
    anyio.run(serve_all, int(sys.argv[1]), int(sys.argv[2]))
