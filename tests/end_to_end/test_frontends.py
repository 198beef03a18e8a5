"""A real service whose intake is in processes of its own: answers, their loss, and what is left."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from scripts.client import PolychipClient
from scripts.generation import Generation
from tests.end_to_end.cluster import ORDINARY, Cluster, Clusters
from tests.golden.cases import GoldenCase, golden_cases

OPTIONS = (*ORDINARY, "--frontends", "2")
STREAMS = 4
LONG = 200
"""Tokens of an answer: it is far from its end when all others have begun."""
DEADLINE_S = 90.0


def frontend_pids(cluster: Cluster) -> list[int]:
    """Of all that ever took clients."""
    return [int(str(line["pid"])) for line in cluster.logged("frontend.listening")]


@pytest.mark.end_to_end
def test_clients_resume_at_new_frontends_when_all_are_killed(clusters: Clusters) -> None:
    cluster = clusters.cluster(*OPTIONS)
    client = clusters.client(*OPTIONS)
    host, port = cluster.grpc.split(":")
    pids = frontend_pids(cluster)
    assert len(set(pids)) == 2
    started = threading.Barrier(STREAMS + 1)
    killed = threading.Event()
    losses: list[str] = []

    def ask(case: GoldenCase) -> tuple[int, ...]:
        generation = Generation(
            prompt=tuple(case.prompt_ids),
            temperature=0,
            max_tokens=LONG,
            ignore_eos=True,
        )
        ids: list[int] = []
        with PolychipClient(host, int(port)) as own:
            for piece in own.generate(generation, on_lost=lambda: losses.append(case.name)):
                ids.extend(piece.token_ids)
                if not killed.is_set():
                    started.wait(DEADLINE_S)
                    killed.wait(DEADLINE_S)
        return tuple(ids)

    cases = golden_cases()[:STREAMS]
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(ask, case) for case in cases]
        started.wait(DEADLINE_S)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed.set()
        ids = [answer.result() for answer in answers]
    assert [len(each) for each in ids] == [LONG] * STREAMS
    for case, each in zip(cases, ids, strict=True):
        assert each[: len(case.output_ids)] == case.output_ids, case.name
    assert sorted(losses) == sorted(case.name for case in cases)
    lost = cluster.logged("frontend.lost")
    assert [line["status"] for line in lost] == [-signal.SIGKILL] * 2
    assert sum(int(str(line["calls_cancelled"])) for line in lost) == STREAMS
    client.flush()
    deadline = time.monotonic() + DEADLINE_S
    while any(group.blocks.free < group.blocks.total for group in client.status().groups):
        assert time.monotonic() < deadline, client.status()
        time.sleep(0.1)
    assert httpx.get(f"{cluster.http}/health", timeout=30, trust_env=False).status_code == 200
