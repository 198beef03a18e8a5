"""KV05: one request that needs most of the memory, or fills every step, keeps all others out.

Here requests that fit pass one that lacks blocks until it has waited for the ageing time; from then
on nobody does. How long who waits is tried on a virtual clock, the rest on real processes.
"""

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from control_plane.config import POLICIES, SchedulingConfig
from protos import inference_pb2
from tests.fakes.driven_core import DrivenCore, reference
from tests.field.answers import Answer, Refused
from tests.field.field_cluster import BLOCK, CHUNK, RUNNING_MAX, FieldCluster, check_equal
from tests.field.prompts import random_ids
from tests.field.shared_specs import SCARCE

CLUSTER = SCARCE
BLOCKS = 24
HUNGRY_TOKENS = 340
"""With twelve of output 22 of the 24 blocks."""
LONG_TOKENS = 320
"""Ten chunks."""
TINY = 50
TINY_TOKENS = 6


# ---------------------------------------------------------------- virtual clock


@pytest.mark.parametrize("policy", POLICIES)
def test_tiny_requests_go_on_and_the_hungry_one_gets_its_turn(policy: str) -> None:
    config = SchedulingConfig(
        block_tokens=BLOCK, chunk_tokens=CHUNK, running_max=RUNNING_MAX, policy=policy, ageing_s=2.0
    )
    core = DrivenCore(config, blocks=BLOCKS).serve(context_tokens=512)
    core.submit("first", range(900, 1000), max_tokens=150)
    while "first" not in core.outputs:
        core.finish_step()
    core.submit("hungry", range(HUNGRY_TOKENS), max_tokens=12)
    core.submit("long", range(400, 400 + LONG_TOKENS), max_tokens=8)
    waits: list[int] = []
    sent_at: dict[str, int] = {}
    # More tiny ones come all the time: only its age can get the hungry one in.
    for step in range(1000):
        open_tiny = [name for name in sent_at if name not in core.outputs]
        while len(open_tiny) < 10 and "hungry" not in core.outputs:
            name = f"tiny{len(sent_at)}"
            core.submit(name, [len(sent_at) % 90, 1, 2, 3, 4, 5, 6, 7], max_tokens=TINY_TOKENS)
            sent_at[name] = step
            open_tiny.append(name)
        if not core.in_flight():
            break
        core.finish_step()
        core._end_complete()
        waits += [step - sent_at[name] for name in open_tiny if name in core.outputs]
        if "hungry" not in core.outputs:
            waited_s = core.now - 100.0
            # Its age, the rest of who came first, its own chunks.
            assert waited_s < config.ageing_s + 2.5, "the hungry one starves"
    core.finish_all()
    assert not core.errors
    assert core.outputs["hungry"] == reference(range(HUNGRY_TOKENS), 12)
    assert core.outputs["long"] == reference(range(400, 400 + LONG_TOKENS), 8)
    assert len(waits) == len(sent_at) > TINY
    waits.sort()
    # Only those wait long that come while the hungry one has its turn.
    assert waits[len(waits) // 2] <= 20
    assert waits[int(len(waits) * 0.95)] <= 100


# ---------------------------------------------------------------- real processes


def ask_tiny(field: FieldCluster, index: int) -> Answer:
    prompt = random_ids(("kv05", index % 10), 8)
    protocol = ("http", "http-stream", "grpc")[index % 3]
    return field.ask(protocol, prompt, max_tokens=TINY_TOKENS, ignore_eos=True)


@pytest.mark.end_to_end
def test_all_of_them_end_in_time(field: FieldCluster) -> None:
    expected = [field.oracle(random_ids(("kv05", index), 8), TINY_TOKENS) for index in range(10)]
    hungry_prompt = random_ids("kv05 hungry", HUNGRY_TOKENS)
    long_prompt = random_ids("kv05 long", LONG_TOKENS)
    hungry_alone = field.oracle(hungry_prompt, 12)
    long_alone = field.oracle(long_prompt, 8)
    with ThreadPoolExecutor(TINY + 2) as pool:
        hungry = pool.submit(field.ask, "grpc", hungry_prompt, max_tokens=12, ignore_eos=True)
        long = pool.submit(field.ask, "http", long_prompt, max_tokens=8, ignore_eos=True)
        tiny = [pool.submit(ask_tiny, field, index) for index in range(TINY)]
        for index, each in enumerate(tiny):
            check_equal(each.result(timeout=30), expected[index % 10])
        check_equal(hungry.result(timeout=30), hungry_alone)
        check_equal(long.result(timeout=30), long_alone)


@pytest.mark.end_to_end
def test_admission_goes_on_by_itself_once_the_big_ones_are_gone(field: FieldCluster) -> None:
    field.check_alive()
    expected = [field.oracle(random_ids(("kv05", index), 8), TINY_TOKENS) for index in range(10)]
    pids = field.worker_pids()
    for kind in ("hungry", "long"):
        # Between a look and the stop of the workers a big one may end.
        for attempt in range(5):
            ends = cancel_big_ones(field, f"kv05-{kind}-{attempt}", pids, expected)
            if ends == ["CANCELLED"] * 2:
                break
        else:
            pytest.fail(f"the big ones always ended by themselves: {ends}")
        field.check_alive()
        field.check_idle()
    assert field.worker_pids() == pids


def cancel_big_ones(
    field: FieldCluster, name: str, pids: Mapping[str, int], expected: list[Answer]
) -> list[str]:
    """How two big ones ended that were cancelled while tiny ones waited behind them."""
    with ThreadPoolExecutor(TINY + 2) as pool:
        big = [pool.submit(ask_big, field, f"{name}-{index}") for index in range(2)]
        while not (field.status().groups[0].running or any(each.done() for each in big)):
            time.sleep(0.001)
        # A worker that computes on ends the big ones before a busy machine has cancelled them.
        with stopped(pids.values()):
            tiny = [pool.submit(ask_tiny, field, index) for index in range(TINY)]
            time.sleep(0.05)
            for index in range(2):
                request = inference_pb2.CancelRequest(request_id=f"{name}-{index}")
                field.client.inference.Cancel(request, timeout=30)
        for index, each in enumerate(tiny):
            check_equal(each.result(timeout=30), expected[index % 10])
        return [each.result(timeout=30) for each in big]


@contextmanager
def stopped(pids: Collection[int]) -> Iterator[None]:
    """Keeps processes from running, for less time than makes their service give them up."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def ask_big(field: FieldCluster, request_id: str) -> str:
    """How a request ends that would take 22 blocks and 150 steps or more."""
    prompt = random_ids(request_id, LONG_TOKENS if "long" in request_id else 200)
    left = BLOCKS * BLOCK - 32 - len(prompt)
    try:
        field.ask("grpc", prompt, max_tokens=left, ignore_eos=True, request_id=request_id)
    except Refused as refused:
        return refused.code.name
    return grpc.StatusCode.OK.name
