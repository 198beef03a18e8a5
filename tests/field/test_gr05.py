"""GR05: the client's deadline passes and the server works on.

Here the deadline of a gRPC call holds at every stage: a running request stops within a few steps,
a queued one never starts, and the client is told DEADLINE_EXCEEDED.
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
from tests.field.field_cluster import FieldCluster
from tests.field.scrape import Scrape, scrape
from tests.field.shared_specs import PAIR

pytestmark = pytest.mark.end_to_end

CLUSTER = PAIR
DEADLINE_S = 0.3
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
LONG_TOKENS = 900
FILLER_TOKENS = 500
FILLERS = 4
STOP_S = 2.0
STILL_S = 0.5


def begin(field: FieldCluster, tokens_count: int, **parameters: object) -> OpenCall:
    return open_call(
        field, "grpc", "the quick brown fox", max_tokens=tokens_count, ignore_eos=True, **parameters
    )


def check_counted(before: Scrape, after: Scrape) -> None:
    """The service saw the deadline pass, or its client leave because of it: either comes first."""
    after.check_reconciled()
    reasons = (DEADLINE_EXCEEDED, "CANCELLED")
    failures = [after.total("request_failures", reason) for reason in reasons]
    failures_before = [before.total("request_failures", reason) for reason in reasons]
    assert sum(failures) - sum(failures_before) == 1
    assert after.total("request_success") == before.total("request_success")


def test_a_running_request_stops_at_its_deadline(field: FieldCluster) -> None:
    before, drawn_before = scrape(field), field.status().generated_tokens
    call = begin(field, LONG_TOKENS, deadline_s=DEADLINE_S)
    assert call.outcome() == DEADLINE_EXCEEDED
    told_at = time.monotonic()
    wait_until(lambda: not running_count(field), "the worker stops", STOP_S)
    stopped_s, drawn = time.monotonic() - told_at, field.status().generated_tokens
    time.sleep(STILL_S)
    assert field.status().generated_tokens == drawn, f"it went on after {stopped_s:.2f} s"
    assert 0 < drawn - drawn_before < LONG_TOKENS
    check_counted(before, scrape(field))


def test_a_queued_request_never_starts_after_its_deadline(field: FieldCluster) -> None:
    fillers = [begin(field, FILLER_TOKENS) for _ in range(FILLERS)]
    wait_until(lambda: running_count(field) == FILLERS, "every slot is taken")
    before = scrape(field)
    queued = begin(field, LONG_TOKENS, deadline_s=DEADLINE_S)
    wait_until(lambda: waiting_count(field) == 1, "it waits")
    assert queued.outcome() == DEADLINE_EXCEEDED
    assert not queued.tokens_count
    wait_until(lambda: not waiting_count(field), "it leaves the queue", STOP_S)
    assert running_count(field) == FILLERS, "it started"
    check_counted(before, scrape(field))
    assert set(leave_all(fillers)) == {LEFT}


def test_a_deadline_that_suffices_changes_nothing(field: FieldCluster) -> None:
    expected = field.oracle("the quick brown fox", 20)
    assert begin(field, 20, deadline_s=60.0).answer().ids == expected.ids
