"""DC01: the worker goes on to max_tokens after the client has left.

Here leaving ends the request wherever it is: a running one within a few steps, a queued one before
it ever starts.
"""

import time

import pytest

from tests.field.calls import (
    LEFT,
    OpenCall,
    leave_all,
    open_call,
    running_count,
    wait_until,
    waiting_count,
)
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.scrape import scrape
from tests.field.shared_specs import PAIR

pytestmark = pytest.mark.end_to_end

CLUSTER = PAIR
PROMPT = "the quick brown fox"
LONG_TOKENS = 900
FILLER_TOKENS = 500
FILLERS = 4
SEEN_TOKENS = 5
STOP_S = 2.0
STILL_S = 0.5


def generated(field: FieldCluster) -> int:
    return int(field.status().generated_tokens)


def begin(field: FieldCluster, protocol: str, tokens_count: int) -> OpenCall:
    return open_call(field, protocol, PROMPT, max_tokens=tokens_count, ignore_eos=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_running_request_stops_when_its_client_leaves(field: FieldCluster, protocol: str) -> None:
    before, generated_before = scrape(field), generated(field)
    call = begin(field, protocol, LONG_TOKENS)
    wait_until(lambda: generated(field) >= generated_before + SEEN_TOKENS, "first tokens")
    if protocol != "http":
        call.wait_for_tokens(SEEN_TOKENS)
    call.leave()
    left_at = time.monotonic()
    wait_until(lambda: not running_count(field), "the worker stops", STOP_S)
    stopped_s, tokens_count = time.monotonic() - left_at, generated(field)
    time.sleep(STILL_S)
    assert generated(field) == tokens_count, f"it went on after {stopped_s:.2f} s"
    assert tokens_count - generated_before < LONG_TOKENS
    assert call.outcome() == LEFT
    after = scrape(field)
    assert after.total("request_failures", "CANCELLED") == 1 + before.total(
        "request_failures", "CANCELLED"
    )
    assert after.total("request_success") == before.total("request_success")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_queued_request_never_starts_when_its_client_leaves(
    field: FieldCluster, protocol: str
) -> None:
    before = scrape(field)
    fillers = [begin(field, "grpc", FILLER_TOKENS) for _ in range(FILLERS)]
    wait_until(lambda: running_count(field) == FILLERS, "every slot is taken")
    queued = begin(field, protocol, LONG_TOKENS)
    wait_until(lambda: waiting_count(field) == 1, "it waits")
    queued.leave()
    wait_until(lambda: not waiting_count(field), "it leaves the queue", STOP_S)
    assert running_count(field) == FILLERS, "it started"
    assert queued.outcome() == LEFT
    assert scrape(field).total("request_failures", "CANCELLED") == 1 + before.total(
        "request_failures", "CANCELLED"
    )
    assert set(leave_all(fillers)) == {LEFT}
