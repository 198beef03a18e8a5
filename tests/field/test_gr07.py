"""GR07: a slow reader makes the server's memory grow.

Here what a client has not read waits as one piece, bounded by the answer itself, and the transport
is not filled further: generation and neighbours keep their speed, and the slow client gets all of
it. One that reads nothing at all for the time of --stream-stall loses its call with an error.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from tests.field.answers import Refused
from tests.field.calls import GrpcCall, HttpCall, OpenCall, running_count, wait_until
from tests.field.field_cluster import FieldCluster, check_equal
from tests.field.processes import control_plane_pid, memory_bytes
from tests.field.scrape import scrape
from tests.field.shared_specs import LARGE, LARGE_STALL_S, LARGE_TOPS

pytestmark = [pytest.mark.end_to_end, pytest.mark.quiet]

CLUSTER = LARGE
CLIENTS = ("grpc",) * 16 + ("http-stream",) * 4
STALLED = ("grpc", "http-stream")
CHAT = [{"role": "user", "content": "the quick brown fox"}]
TOPS = LARGE_TOPS
TOKENS = {"grpc": 100, "http-stream": 100}
STALLED_TOKENS = {"grpc": 100, "http-stream": 220}
"""An answer that does not fit into the buffers on its way: of the kernel 4 MB, of gRPC less."""
PAUSE_S = 0.5
AHEAD_BYTES = 16 << 10
CHANNEL_OPTIONS = [
    *[("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)],
    ("grpc.http2.lookahead_bytes", AHEAD_BYTES),
]
TOP_BYTES = 60
"""Of one of the likeliest tokens with its log-probability, as Python objects."""
GROWTH_BYTES_MAX = (len(CLIENTS) * 100 + 320) * TOPS * TOP_BYTES + (32 << 20)
NEIGHBOUR_TOKENS, NEIGHBOUR_TRIES = 20, 10
WITHIN = 0.25
"""A tenth, and what our own twenty threads take from the machine."""
COMPUTED_S = 60.0
STUCK_S = 4.0
LEFT_S = 2.0


@contextmanager
def slow_calls(
    field: FieldCluster, protocols: Sequence[str], tokens: Mapping[str, int], pause_s: float
) -> Iterator[list[OpenCall]]:
    """Each on a connection of its own that takes little ahead of its reader."""
    asked: dict[str, object] = {"ignore_eos": True, "logprobs": True, "top_logprobs": TOPS}
    calls: list[OpenCall] = []
    with ExitStack() as stack:
        for protocol in protocols:
            parameters = asked | {"max_tokens": tokens[protocol]}
            if protocol == "grpc":
                channel = grpc.insecure_channel(field.cluster.grpc, CHANNEL_OPTIONS)
                stack.callback(channel.close)
                call: OpenCall = GrpcCall(field, CHAT, channel=channel, **parameters)
            else:
                call = HttpCall(field, CHAT, stream=True, receive_bytes=AHEAD_BYTES, **parameters)
            call.pause_s = pause_s
            stack.callback(call.leave)
            calls.append(call)
        yield calls


def neighbour_s(field: FieldCluster, good_s: float = 0.0) -> float:
    """The least of several, since others use the machine too; that it was good once is enough."""
    least_s = math.inf
    for _ in range(NEIGHBOUR_TRIES if not good_s else 4 * NEIGHBOUR_TRIES):
        began = time.monotonic()
        field.ask("grpc", "small animals", max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True)
        least_s = min(least_s, time.monotonic() - began)
        if least_s <= good_s:
            break
    return least_s


def open_count(field: FieldCluster) -> float:
    return scrape(field).total("num_requests_open")


def read_on(calls: Sequence[OpenCall]) -> None:
    for call in calls:
        call.pause_s = 0.0


def has_begun(call: OpenCall) -> bool:
    return call.tokens_count > 0 or call.is_over


def check_given_up(field: FieldCluster, stalled: Sequence[OpenCall]) -> None:
    """Who read nothing all the time has lost the call, and sees it when reading on."""
    wait_until(lambda: open_count(field) == 0, "they are given up", 4 * LARGE_STALL_S)
    read_on(stalled)
    by_grpc, by_http = stalled
    with pytest.raises(Refused, match=f"did not read the answer for {LARGE_STALL_S} s") as caught:
        by_grpc.answer()
    assert caught.value.code is grpc.StatusCode.CANCELLED
    with pytest.raises(Exception, match=r"no end mark|IncompleteRead|reset"):
        by_http.answer()


def test_slow_readers_cost_nobody_else_anything(field: FieldCluster) -> None:
    with slow_calls(field, ["grpc"], TOKENS, 0.0) as (call,):
        expected = call.answer()
    alone_s = neighbour_s(field)
    pid = control_plane_pid(field)
    memory_before = memory_bytes(pid)
    with (
        slow_calls(field, STALLED, STALLED_TOKENS, math.inf) as stalled,
        slow_calls(field, CLIENTS, TOKENS, PAUSE_S) as calls,
    ):
        wait_until(
            lambda: not running_count(field) and all(map(has_begun, calls)), "computed", COMPUTED_S
        )
        assert open_count(field) > len(STALLED), "none was slow"
        beside_s = neighbour_s(field, (1 + WITHIN) * alone_s)
        assert open_count(field) > len(STALLED), "none was slow any more"
        grown = memory_bytes(pid) - memory_before
        read_on(calls)
        for call in calls:
            check_equal(call.answer(), expected)
        if beside_s > (1 + WITHIN) * alone_s:
            alone_s = max(alone_s, neighbour_s(field))  # others may use the machine by now
        check_given_up(field, stalled)
    assert not [line for line in field.cluster.errors() if "Traceback" in line]
    assert beside_s <= (1 + WITHIN) * alone_s
    assert grown < GROWTH_BYTES_MAX


def test_one_that_leaves_is_not_waited_for(field: FieldCluster) -> None:
    """Though the buffers to it are full, and it never takes what is in them."""
    with slow_calls(field, STALLED, STALLED_TOKENS, math.inf) as calls:
        wait_until(
            lambda: not running_count(field) and all(map(has_begun, calls)), "computed", COMPUTED_S
        )
        # By now the kernel looks only every few seconds if there is room again.
        time.sleep(STUCK_S)
        assert open_count(field) == len(calls), "they were not stuck"
        for call in calls:
            call.leave()
        wait_until(lambda: open_count(field) == 0, "who left is gone", LEFT_S)
