"""LM05: tokenizing one huge request freezes health checks and other streams.

Here a text that is too large is refused by its size alone, and what must be tokenized is, in
threads that leave the serving loop free. Nobody waits for it but its own client.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import pairwise

import grpc
import pytest

from tests.fakes.field_models import FieldModel
from tests.field.answers import Refused, grpc_refusal, http_refusal
from tests.field.field_cluster import CALL_DEADLINE_S, ClusterSpec, FieldCluster
from tests.field.running_streams import Watched, running_streams

pytestmark = [pytest.mark.end_to_end, pytest.mark.quiet]

CONTEXT = 100_000
"""So large that a text of 600 kB has to be tokenized before anybody knows that it is too long."""
CLUSTER = ClusterSpec(FieldModel(context=CONTEXT), ("--context", str(CONTEXT)))
MB = 1_000_000
TOKENIZED = 600_000
WORDS = "the quick brown fox "
POLL_S = 0.05
HEALTH_S = 0.5
SLACK = 5
QUIET_S = 1.5


Span = tuple[float, float]
"""Beginning and end, in seconds of the monotonic clock."""


@dataclass
class Probe:
    """When each question for health was open, and when huge texts were read."""

    health: list[Span] = dataclass_field(default_factory=list)
    busy: list[Span] = dataclass_field(default_factory=list)

    def durations(self, spans: list[Span], *, busy: bool) -> list[float]:
        """Of the spans that fall into such a time at least in part, the longest last."""
        return sorted(
            ended - began
            for began, ended in spans
            if any(began <= last and first <= ended for first, last in self.busy) == busy
        )


@contextmanager
def health_polled(field: FieldCluster, probe: Probe) -> Iterator[None]:
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            began = time.monotonic()
            assert field.http.get("/health").status_code == 200
            probe.health.append((began, time.monotonic()))

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def post_http(field: FieldCluster, text: str) -> Callable[[], Refused]:
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()

    def post() -> Refused:
        response = field.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        return http_refusal(response.status_code, response.text)

    return post


def post_grpc(field: FieldCluster, text: str) -> Callable[[], Refused]:
    request = field.grpc_request([{"role": "user", "content": text}], max_tokens=4)

    def post() -> Refused:
        with pytest.raises(grpc.RpcError) as caught:
            list(field.client.inference.Generate(request, CALL_DEADLINE_S))
        return grpc_refusal(caught.value)

    return post


def test_a_huge_text_holds_nobody_up(field: FieldCluster, counted: Callable[[int], int]) -> None:
    posts = {
        (size, protocol.__name__): protocol(field, WORDS * (size // len(WORDS)))
        for size in (20 * MB, 15 * MB, TOKENIZED)
        for protocol in (post_http, post_grpc)
    }
    probe = Probe()
    with running_streams(field) as watched, health_polled(field, probe):
        time.sleep(QUIET_S)
        for _ in range(counted(10)):
            for (size, _), post in posts.items():
                began = time.monotonic()
                refused = post()
                probe.busy.append((began, time.monotonic()))
                check_refusal(refused, size)
        time.sleep(QUIET_S)
    check_gaps(probe, watched)
    usual = probe.durations(probe.health, busy=False)[-1]
    assert probe.durations(probe.health, busy=True)[-1] < max(HEALTH_S, SLACK * usual)
    field.check_alive()


def check_refusal(refused: Refused, size: int) -> None:
    if size == 20 * MB:  # more than a message may have
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.status in (413, None)
        return
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.status in (400, None)
    assert refused.parameter == "messages"
    assert f"context of {CONTEXT} tokens" in refused.message
    by_size = " bytes of text cannot fit"
    by_tokens = " tokens leave no room"
    assert (by_size if size == 15 * MB else by_tokens) in refused.message


def check_gaps(probe: Probe, watched: Watched) -> None:
    """Streams go on while a text is read: the largest gap is not far from a quiet time's."""
    gaps = [gap for arrivals in watched.arrivals for gap in pairwise(arrivals)]
    busy = probe.durations(gaps, busy=True)
    assert len(busy) >= 10, "no stream went on while a text was read"
    usual = max(busy[len(busy) // 2], probe.durations(gaps, busy=False)[-1])
    assert busy[-1] < SLACK * usual
