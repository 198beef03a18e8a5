"""kill -9 of any worker in mid-answer: no stream ends, repeats or skips; the worker comes back."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import Client, request_of
from tests.golden.cases import golden_cases

STREAMS = 8
BACK_DEADLINE_S = 90.0
TWO_GROUPS = ("--groups", "1,1", "--dtype", "float32")
ONE_OF_TWO = ("--groups", "2", "--dtype", "float32", "--chunk-tokens", "512")


def worker_pids(client: Client) -> dict[str, int]:
    return {worker.id: worker.pid for worker in client.status().workers}


def kill_in_mid_answer(client: Client, worker_id: str) -> None:
    cases = golden_cases()[:STREAMS]
    pid = worker_pids(client)[worker_id]
    started = [threading.Event() for _ in cases]
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [
            pool.submit(client.generate, request_of(case.prompt_ids, len(case.output_ids)), event)
            for case, event in zip(cases, started, strict=True)
        ]
        assert all(event.wait(60) for event in started)
        os.kill(pid, signal.SIGKILL)
        finished = [answer.result() for answer in answers]
    for case, answer in zip(cases, finished, strict=True):
        assert tuple(answer.ids) == case.output_ids, case.name
    failovers = [answer.usage.failovers for answer in finished if answer.usage is not None]
    assert max(failovers) >= 1, "no stream was on the killed worker"
    client.wait_until_serving(BACK_DEADLINE_S)
    assert worker_pids(client)[worker_id] != pid


@pytest.mark.end_to_end
@pytest.mark.service(*TWO_GROUPS)
def test_kill_any_worker(clusters: Clusters) -> None:
    client = clusters.client(*TWO_GROUPS)
    for worker_id in ("chip0", "chip1"):
        kill_in_mid_answer(client, worker_id)
    requests = [request_of(case.prompt_ids, len(case.output_ids)) for case in golden_cases()]
    for request in requests:
        # What one group remembers would draw all requests there.
        request.cache_salt = "after the failures"
    answers = client.generate_all(requests)
    assert {answer.usage.group for answer in answers if answer.usage is not None} == {"g0", "g1"}
    assert all(answer.usage.failovers == 0 for answer in answers if answer.usage is not None)


@pytest.mark.end_to_end
@pytest.mark.service(*ONE_OF_TWO)
def test_kill_a_rank_of_a_group(clusters: Clusters) -> None:
    client = clusters.client(*ONE_OF_TWO)
    kill_in_mid_answer(client, "chip1")
