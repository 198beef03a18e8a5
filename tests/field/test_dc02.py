"""DC02: each aborted stream leaks; the engine stalls after 100 to 300 of them.

Here nothing of an aborted stream is left: not in the tables, not in memory, not in the time the
next answer takes.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from tests.field.calls import LEFT, open_call
from tests.field.field_cluster import (
    ALIVE_PROMPT,
    ALIVE_TOKENS,
    PROTOCOLS,
    FieldCluster,
    check_equal,
)
from tests.field.processes import memory_bytes, service_pids
from tests.field.scrape import scrape

pytestmark = pytest.mark.end_to_end

STREAMS = 500
AT_ONCE = 16
PROMPT = "small animals like water and trees"
TOKENS = 200
LEFT_AFTER_S_MAX = 0.5
LATENCY_TRIES = 20
GROWTH_BYTES_MAX = 3 << 20
SETTLE_STREAMS = 32
"""Aborted before memory is looked at: buffers and pools find their size."""


def abort(field: FieldCluster, index: int) -> str:
    random = Random(index)
    call = open_call(
        field, PROTOCOLS[index % 3], f"{PROMPT} {index % 7}", max_tokens=TOKENS, ignore_eos=True
    )
    time.sleep(random.uniform(0, LEFT_AFTER_S_MAX))
    call.leave()
    return call.outcome()


def abort_many(field: FieldCluster, indices: range) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda index: abort(field, index), indices))


def alive_latency_s(field: FieldCluster) -> float:
    """The least of several: what it takes when nothing else runs on the machine."""
    expected = field.oracle(ALIVE_PROMPT, ALIVE_TOKENS)
    times = []
    for _ in range(LATENCY_TRIES):
        began = time.monotonic()
        answer = field.ask("grpc", ALIVE_PROMPT, max_tokens=ALIVE_TOKENS, ignore_eos=True)
        times.append(time.monotonic() - began)
        check_equal(answer, expected)
    return min(times)


def test_aborted_streams_leave_nothing(field: FieldCluster, counted: Callable[[int], int]) -> None:
    abort_many(field, range(SETTLE_STREAMS))
    field.check_idle()
    errors_before = field.cluster.errors()
    pids, before = service_pids(field), scrape(field)
    memory_before = {name: memory_bytes(pid) for name, pid in pids.items()}
    latency_before_s = alive_latency_s(field)
    outcomes = abort_many(field, range(counted(STREAMS)))
    assert outcomes.count(LEFT) > len(outcomes) / 2, "they were over before they could be aborted"
    assert set(outcomes) <= {LEFT, "length"}
    field.check_idle()
    assert alive_latency_s(field) <= 2 * latency_before_s
    field.check_alive()
    assert service_pids(field) == pids
    assert field.cluster.errors() == errors_before
    grown = {name: memory_bytes(pid) - memory_before[name] for name, pid in pids.items()}
    assert max(grown.values()) < GROWTH_BYTES_MAX, grown
    after = scrape(field)
    after.check_reconciled()
    cancelled = after.total("request_failures", "CANCELLED") - before.total(
        "request_failures", "CANCELLED"
    )
    # One that had ended when its client left counts as what it was.
    assert 0 < cancelled <= outcomes.count(LEFT)
