"""What the tokens of a step cost the control plane on their way to frontends, not to clients.

tokens of a step --> FrontHub --> FrameLink of each frontend --> (threads that only read)
"""

import socket
import threading
import time
from contextlib import ExitStack

import anyio.lowlevel

from control_plane.frontends import wire
from control_plane.frontends.frame_link import FrameLink
from control_plane.frontends.front_hub import Frontend, FrontHub
from control_plane.frontends.request_sums import RequestSums
from control_plane.request import Request, Sampling
from control_plane.scheduling.messages import RequestFacts, TokenDelta, Tokens

READ_BYTES = 1 << 16
WARM_UP_STEPS = 5
VOCABULARY = 50_000


async def measure_routes(frontends_count: int, rows_count: int, steps_count: int) -> list[float]:
    """Seconds of the event loop's thread for each of `steps_count` steps: one token for each of
    `rows_count` requests, which the frontends share evenly."""
    hub = FrontHub(lambda _: None, lambda _: b"", lambda: (b"", ""), RequestSums())
    with ExitStack() as stack:
        frontends = []
        for index in range(frontends_count):
            link = await _read_link(stack)
            frontends.append(Frontend(f"frontend{index}", link.send))
            hub.attach(frontends[-1])
        request_ids = [f"request {index:024}" for index in range(rows_count)]
        for number, request_id in enumerate(request_ids):
            frontend = frontends[number % frontends_count]
            hub.take(frontend, wire.opened_message(request_id, number).SerializeToString())
            request = Request(request_id, (1,), Sampling(temperature=0.0, seed=1))
            submit = wire.submit_message(request, number, request_id)
            hub.take(frontend, submit.SerializeToString())
        facts = {request_id: RequestFacts("g0") for request_id in request_ids}
        times_s = []
        for step in range(WARM_UP_STEPS + steps_count):
            token_ids = (step % VOCABULARY,)
            tokens = Tokens(
                tuple(TokenDelta(each, step, token_ids, (), facts[each]) for each in request_ids)
            )
            started = time.thread_time()
            hub.deliver(tokens)
            await anyio.lowlevel.checkpoint()  # it is sent when the loop comes round
            times_s.append(time.thread_time() - started)
    return times_s[WARM_UP_STEPS:]


async def _read_link(stack: ExitStack) -> FrameLink:
    """A link whose other end a thread reads and forgets, until the stack is left."""
    ours, theirs = socket.socketpair()

    def read() -> None:
        with theirs:
            while theirs.recv(READ_BYTES):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    stack.callback(reader.join)
    link = await FrameLink.over(ours)
    stack.callback(ours.shutdown, socket.SHUT_RDWR)
    stack.callback(link.abort)
    return link
