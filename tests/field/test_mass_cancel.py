"""Cancels in masses, at random moments under load, in every way and on both protocols.

Whatever of it is cancelled when, afterwards blocks, slots, streams, connections and every gauge are
what they were before, and the counters account for every request.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.field.calls import LEFT, OpenCall, open_call, wait_until
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.processes import service_pids
from tests.field.scrape import Scrape, scrape

pytestmark = pytest.mark.end_to_end

REQUESTS = 2000
AT_ONCE = 16
MOMENT_S_MEAN = 0.08
LEFT_ALONE = 0.05
"""Share of the requests that nobody cancels."""
BEGINNINGS = ("the quick brown fox jumps over the lazy dog and then", "small animals", "it runs")
CANCELLED, QUEUE_FULL = "CANCELLED", "QUEUE_FULL"
WAYS = ("by a call", "by leaving")
SETTLE_S = 5.0

Parameters = dict[str, object]


def parameters_of(random: Random, protocol: str) -> Parameters:
    """A greedy request, or one of several choices, with stop strings, with scores of its prompt."""
    parameters: Parameters = {"max_tokens": random.randint(1, 120), "ignore_eos": True}
    kind = random.randrange(5)
    if kind == 0:
        parameters |= {"n": random.randint(2, 3), "temperature": 1.0}
    elif kind == 1:
        parameters |= {"stop": ["never comes", "nor does this"], "min_tokens": 1}
    elif kind == 2 and protocol == "http-stream":
        parameters |= {"echo": True, "logprobs": 2}
    elif kind == 2:
        parameters |= {"prompt_logprobs": 2}
    elif kind == 3:
        parameters |= {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5}
    return parameters


class Storm:
    """Requests and what became of them."""

    def __init__(self, field: FieldCluster) -> None:
        self.field = field

    def run(self, count: int) -> Counter[str]:
        """AT_ONCE at a time; how many had each outcome."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return Counter(pool.map(self.one, range(count)))

    def one(self, index: int) -> str:
        """Outcome of one request; `index` decides everything about it but the timing."""
        random = Random(index)
        protocol = PROTOCOLS[index % len(PROTOCOLS)]
        parameters = parameters_of(random, protocol)
        if protocol == "grpc":
            parameters["request_id"] = f"storm-{index}"
        prompt = f"{random.choice(BEGINNINGS)} {random.randrange(50)}" * random.randint(1, 3)
        call = open_call(self.field, protocol, prompt, **parameters)
        if random.random() < LEFT_ALONE:
            return call.outcome()
        # Many at once after the beginning, some much later.
        time.sleep(random.expovariate(1 / MOMENT_S_MEAN) if random.random() < 0.9 else 0.0)
        return self.end(call, random.choice(WAYS))

    def end(self, call: OpenCall, way: str) -> str:
        if way == "by leaving" or not call.request_id:
            call.leave()
            return call.outcome()
        found = call.cancel()
        outcome = call.outcome()
        assert found == (outcome == CANCELLED), f"found {found}, then {outcome}"
        return outcome


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def check_counters(before: Scrape, after: Scrape, outcomes: Counter[str]) -> None:
    """Of one whose client left nobody knows here whether the service had ended it before."""

    def rise(name: str, *labels: str) -> float:
        return after.total(name, *labels) - before.total(name, *labels)

    after.check_reconciled()
    left = outcomes[LEFT]
    received = rise("requests_received")
    # One that left at once may never have been read.
    assert outcomes.total() - left <= received <= outcomes.total()
    assert rise("request_success") + rise("request_failures") == received
    for outcome in (CANCELLED, QUEUE_FULL):
        assert outcomes[outcome] <= rise("request_failures", outcome) <= outcomes[outcome] + left
    for outcome in ("length", "stop"):
        assert outcomes[outcome] <= rise("request_success", outcome) <= outcomes[outcome] + left
    assert rise("request_failures") == (
        rise("request_failures", CANCELLED) + rise("request_failures", QUEUE_FULL)
    )
    assert rise("time_to_first_token_seconds_count") <= received
    assert rise("prompt_tokens_cached") <= rise("prompt_tokens")


def test_nothing_is_left_of_cancels_in_masses(
    field: FieldCluster, counted: Callable[[int], int]
) -> None:
    storm = Storm(field)
    field.check_alive()
    storm.run(AT_ONCE)  # connections and threads are there
    field.check_idle()
    errors_before = field.cluster.errors()
    pids, before, drawn_before = service_pids(field), scrape(field), field.status().generated_tokens
    files_before = {name: open_files(pid) for name, pid in pids.items()}

    outcomes = storm.run(counted(REQUESTS))

    field.check_idle()
    after = scrape(field)
    assert after.gauges == before.gauges
    assert set(outcomes) <= {LEFT, CANCELLED, QUEUE_FULL, "length", "stop"}, outcomes
    assert outcomes[LEFT] + outcomes[CANCELLED] > outcomes.total() / 2, outcomes
    assert min(outcomes[CANCELLED], outcomes["length"]) > 0, outcomes
    check_counters(before, after, outcomes)
    delivered = after.total("generation_tokens") - before.total("generation_tokens")
    assert 0 < delivered <= field.status().generated_tokens - drawn_before
    wait_until(
        lambda: all(open_files(pid) <= files_before[name] for name, pid in pids.items()),
        "connections are closed",
        SETTLE_S,
    )
    assert service_pids(field) == pids
    assert field.cluster.errors() == errors_before, "a client that leaves is no failure of ours"
    field.check_alive()
