"""DC04: a cancel crashes the server; a cancel of a preempted request leaks its saved state.

Here there is one way out of every state, taken once: whoever waits, is prefilled, decodes, is
preempted or just ends is cancelled by another call, twice, or by leaving. The same over the
scheduling core alone, state by state, is tests/control_plane/scheduling/test_cancel.py.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from time import sleep

import pytest

from protos import inference_pb2
from tests.field.calls import (
    LEFT,
    OpenCall,
    open_call,
    running_count,
    wait_until,
    waiting_count,
)
from tests.field.field_cluster import CHUNK, CONTEXT, RUNNING_MAX, FieldCluster
from tests.field.processes import service_pids
from tests.field.scrape import scrape

pytestmark = [pytest.mark.end_to_end, pytest.mark.quiet]

ROUNDS = 300
STATES = ("queued", "prefilling", "decoding", "preempted", "finishing")
PROTOCOLS_WITH_IDS = ("grpc", "http-stream")
CANCELLED = "CANCELLED"
PREFILL_PROMPT = 6 * CHUNK
PREFILL_S_MAX = 0.04
FILLER_TOKENS = 110
"""Of each of RUNNING_MAX: all of them fit into memory."""
CROWD_PROMPT, CROWD_TOKENS = 100, 100
"""RUNNING_MAX such prompts fit into memory, their answers do not."""


class Rounds:
    """Each ends requests in one state, and leaves nothing running."""

    def __init__(self, field: FieldCluster, seed: int) -> None:
        self.field = field
        self.random = Random(seed)
        self.reached: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def run(self, state: str, protocol: str) -> None:
        """`reached` says if the state was met: the service goes on while we look at it."""
        self.reached[state] += getattr(self, state)(protocol)
        wait_until(lambda: not (running_count(self.field) or waiting_count(self.field)), "rest")

    def queued(self, protocol: str) -> bool:
        filler = self.open("grpc", 1, FILLER_TOKENS, n=RUNNING_MAX)
        wait_until(lambda: running_count(self.field) == RUNNING_MAX, "every slot is taken")
        call = self.open(protocol, 20, 20)
        wait_until(lambda: waiting_count(self.field) == 1 or call.is_over, "it waits")
        self.stop(call)
        self.stop(filler)
        return not call.tokens_count

    def prefilling(self, protocol: str) -> bool:
        call = self.open(protocol, PREFILL_PROMPT, 20)
        sleep(self.random.uniform(0, PREFILL_S_MAX))
        self.stop(call)
        return not call.tokens_count

    def decoding(self, protocol: str) -> bool:
        call = self.open(protocol, 20, CONTEXT - 20)
        call.wait_for_tokens(self.random.randint(1, 20))
        return self.stop(call) != "length"

    def preempted(self, protocol: str) -> bool:
        retracted = self.retracted_count()
        calls = [self.open(protocol, CROWD_PROMPT, CROWD_TOKENS) for _ in range(RUNNING_MAX)]
        wait_until(
            lambda: self.retracted_count() > retracted or all(each.is_over for each in calls),
            "someone is preempted",
        )
        waited = waiting_count(self.field) > 0
        self.random.shuffle(calls)
        for call in calls:
            self.stop(call)
        return waited

    def finishing(self, protocol: str) -> bool:
        call = self.open(protocol, 20, 10)
        call.wait_for_tokens(9)
        self.stop(call, by_call=True)
        return True

    # ------------------------------------------------------------ parts

    def open(self, protocol: str, prompt_count: int, tokens: int, **parameters: object) -> OpenCall:
        """A prompt that shares nothing with any other."""
        prompt = [self.random.randrange(5, 500) for _ in range(prompt_count)]
        if protocol == "grpc":
            parameters["request_id"] = f"{self.random.getrandbits(64):x}"
        return open_call(
            self.field, protocol, prompt, max_tokens=tokens, ignore_eos=True, **parameters
        )

    def stop(self, call: OpenCall, *, by_call: bool | None = None) -> str:
        """By another call or by leaving; over HTTP nobody can name a request without a token."""
        if by_call is None:
            by_call = self.random.random() < 0.5
        if by_call and call.request_id:
            outcome = self.cancel(call)
        else:
            call.leave()
            outcome = call.outcome()
            assert outcome in (LEFT, "length")
        self.outcomes[outcome] += 1
        return outcome

    def cancel(self, call: OpenCall) -> str:
        """The second cancel finds nothing; the first tells whether there was something to end."""
        found = call.cancel()
        outcome = call.outcome()
        assert outcome == (CANCELLED if found else "length")
        assert not call.cancel(), "it was cancelled twice"
        return outcome

    def retracted_count(self) -> int:
        return sum(group.retracted for group in self.field.status().groups)


@pytest.mark.parametrize("protocol", PROTOCOLS_WITH_IDS)
def test_every_cancel_ends_its_request_once(
    field: FieldCluster, counted: Callable[[int], int], protocol: str
) -> None:
    field.oracle("the quick brown fox", 8)
    pids, before = service_pids(field), scrape(field)
    rounds = Rounds(field, seed=len(protocol))
    count = counted(ROUNDS) // len(PROTOCOLS_WITH_IDS)
    for index in range(count):
        rounds.run(STATES[index % len(STATES)], protocol)
    # A busy machine lets a request leave a state before its cancel comes: those are asked again.
    needed = count / len(STATES) / 2
    for _ in range(count):
        missed = [state for state in STATES if rounds.reached[state] < needed]
        if not missed:
            break
        rounds.run(missed[0], protocol)
    field.check_idle()
    assert service_pids(field) == pids
    field.check_alive()
    after = scrape(field)
    after.check_reconciled()
    assert min(rounds.reached[state] for state in STATES) >= needed, rounds.reached
    assert rounds.outcomes[CANCELLED]
    assert rounds.outcomes[LEFT]
    cancelled = after.total("request_failures") - before.total("request_failures")
    assert rounds.outcomes[CANCELLED] <= cancelled
    assert cancelled <= rounds.outcomes[CANCELLED] + rounds.outcomes[LEFT]


def test_a_cancel_of_nobody_is_no_error(field: FieldCluster) -> None:
    for request_id in ("nobody", "", "x" * 10_000):
        request = inference_pb2.CancelRequest(request_id=request_id)
        assert not field.client.inference.Cancel(request, timeout=30).found
