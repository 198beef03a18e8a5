"""Streams that go on beside whatever a scenario does; each must stay what it is alone."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tests.field.answers import Answer, answer_of_messages, answer_of_stream
from tests.field.field_cluster import CALL_DEADLINE_S, FieldCluster, Prompt, check_equal

STREAM_PROMPTS = (
    "the quick brown fox",
    "it runs away from here",
    "small animals like water",
    "please start counting",
)
"""The two likeliest of a Mix differ by more than 0.01 at each of the first 120 tokens."""
STREAM_TOKENS = 100
RUNNING_DEADLINE_S = 30.0
POLL_S = 0.01
Piece = TypeVar("Piece")


@dataclass
class Watched:
    """When the pieces of each finished answer came, in seconds of the monotonic clock."""

    arrivals: list[list[float]] = field(default_factory=list)


@contextmanager
def running_streams(
    cluster: FieldCluster,
    prompts: Sequence[str] = STREAM_PROMPTS,
    tokens_count: int = STREAM_TOKENS,
) -> Iterator[Watched]:
    """As many streams as prompts for as long as the block runs, by turns over HTTP and gRPC.

    The cluster is idle before it. Fails after the block unless every answer was its ORACLE.
    """
    oracles = [cluster.oracle(prompt, tokens_count) for prompt in prompts]
    over = threading.Event()
    watched = Watched()
    with ThreadPoolExecutor(len(prompts)) as pool:
        works = [
            pool.submit(_keep_asking, cluster, index, prompt, oracle, over, watched)
            for index, (prompt, oracle) in enumerate(zip(prompts, oracles, strict=True))
        ]
        try:
            _wait_until_running(cluster, len(prompts))
            yield watched
        finally:
            over.set()
    for work in works:
        work.result()


def _keep_asking(
    cluster: FieldCluster,
    index: int,
    prompt: str,
    oracle: Answer,
    over: threading.Event,
    watched: Watched,
) -> None:
    while not over.is_set():
        protocol = "http-stream" if index % 2 else "grpc"
        length = {"max_tokens": len(oracle.ids), "ignore_eos": True}
        arrivals, answer = ask_watched(cluster, protocol, prompt, **length)
        check_equal(answer, oracle)
        watched.arrivals.append(arrivals)


def ask_watched(
    cluster: FieldCluster, protocol: str, prompt: Prompt, **parameters: object
) -> tuple[list[float], Answer]:
    """When the pieces came, and the answer. protocol: http-stream or grpc; the rest as `ask`."""
    arrivals: list[float] = []
    if protocol == "grpc":
        request = cluster.grpc_request(prompt, **parameters)
        messages = cluster.client.inference.Generate(request, CALL_DEADLINE_S)
        return arrivals, answer_of_messages(_noting(messages, arrivals))
    assert protocol == "http-stream", protocol
    path, body = cluster.http_request(prompt, **parameters)
    stream = cluster.stream(path, body | {"stream_options": {"include_usage": True}})
    assert stream.status == 200, stream.body
    return [moment for moment, _ in stream.events], answer_of_stream(stream)


def _noting(pieces: Iterable[Piece], arrivals: list[float]) -> Iterator[Piece]:
    for piece in pieces:
        arrivals.append(time.monotonic())
        yield piece


def _wait_until_running(cluster: FieldCluster, count: int) -> None:
    deadline = time.monotonic() + RUNNING_DEADLINE_S
    while sum(group.running for group in cluster.status().groups) < count:
        assert time.monotonic() < deadline, f"{count} streams never ran at once"
        time.sleep(POLL_S)
