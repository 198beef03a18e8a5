"""MT02: after all requests are cancelled the gauges freeze at full, so that nothing is sent there
any more; aborts are missing from the counters.

Here gauges are read from the scheduler when the scrape comes: they fall without another step.
Aborts have the label CANCELLED, and the next requests are spread as if nothing had been.
"""

from collections import Counter

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
from tests.field.field_cluster import PROTOCOLS, FieldCluster, together
from tests.field.scrape import Scrape, scrape
from tests.field.shared_specs import PAIR

pytestmark = pytest.mark.end_to_end

CLUSTER = PAIR
PROMPT = "the quick brown fox"
SLOTS = 4
REQUESTS = 16
TOKENS = 450
FALL_S = 2.0
NEXT_REQUESTS, NEXT_TOKENS = 8, 30
LOAD = ("num_requests_running", "num_requests_waiting", "num_requests_open", "steps_in_flight")


def load(now: Scrape) -> dict[str, float]:
    """What a router would look at."""
    referenced = sum(now.total("kv_blocks", group, "referenced") for group in ("g0", "g1"))
    names = (*LOAD, "num_requests_held", "kv_cache_usage_perc")
    return {name: now.total(name) for name in names} | {"referenced": referenced}


def saturate(field: FieldCluster) -> list[OpenCall]:
    calls = [
        open_call(field, PROTOCOLS[i % 3], f"{PROMPT} {i}", max_tokens=TOKENS, ignore_eos=True)
        for i in range(REQUESTS)
    ]
    wait_until(
        lambda: running_count(field) == SLOTS and waiting_count(field) == REQUESTS - SLOTS, "full"
    )
    return calls


def test_gauges_fall_with_the_last_client(field: FieldCluster) -> None:
    idle = scrape(field)
    assert not any(load(idle).values()), load(idle)
    calls = saturate(field)
    full = scrape(field)
    assert full.total("num_requests_running") == SLOTS
    assert full.total("num_requests_waiting") == REQUESTS - SLOTS
    assert full.total("num_requests_open") == REQUESTS
    assert min(full.total("num_requests_running", group) for group in ("g0", "g1")) > 0
    assert load(full)["referenced"] > 0
    assert full.total("kv_cache_usage_perc") > 0

    assert set(leave_all(calls)) == {LEFT}
    wait_until(lambda: not any(load(scrape(field)).values()), "gauges fall", FALL_S)
    rest = scrape(field)
    rest.check_reconciled()
    for name, *labels in (
        ("request_failures", "CANCELLED"),
        ("requests_received",),
    ):
        assert rest.total(name, *labels) - idle.total(name, *labels) == REQUESTS
    assert rest.total("request_success") == idle.total("request_success")
    field.client.flush()
    assert scrape(field).gauges == idle.gauges

    check_spread(field)


def check_spread(field: FieldCluster) -> None:
    """One request is served, and of several at once each group gets its part."""
    assert len(field.ask("http", PROMPT, max_tokens=3, ignore_eos=True).ids) == 3
    answers = together(
        *(
            lambda i=i: field.ask(
                PROTOCOLS[i % 3], f"{i} {PROMPT}", max_tokens=NEXT_TOKENS, ignore_eos=True
            )
            for i in range(NEXT_REQUESTS)
        )
    )
    shares = Counter(answer.group for answer in answers)
    assert set(shares) == {"g0", "g1"}, shares
