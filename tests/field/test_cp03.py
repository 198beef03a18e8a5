"""CP03: a long prompt stops all running streams until it is computed.

Here every step has the decode rows first and at most one chunk, of which a short prompt gets its
part. What a step holds is tried on a virtual clock; that clients see it, on real processes.
"""

import itertools
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from time import monotonic

import pytest

from control_plane.config import POLICIES, SchedulingConfig
from tests.fakes.driven_core import DrivenCore, reference
from tests.field.field_cluster import BLOCK, CHUNK, RUNNING_MAX, FieldCluster
from tests.field.prompts import random_ids

STREAMS = 4
CHUNKS = 8
ROUNDS = 5
LONG_TOKENS = CHUNKS * CHUNK - 6
"""Eight chunks, the last not quite full: the context of 256 has to hold the answer, too."""


@pytest.mark.parametrize("policy", POLICIES)
def test_between_two_steps_of_decoding_lies_one_chunk_at_most(policy: str) -> None:
    """Virtual clock."""
    config = SchedulingConfig(
        block_tokens=BLOCK, chunk_tokens=CHUNK, running_max=RUNNING_MAX, policy=policy
    )
    core = DrivenCore(config, blocks=64).serve(context_tokens=512)
    for index in range(STREAMS):
        core.submit(f"stream{index}", range(index, index + 5), max_tokens=100)
    while len(core.outputs) < STREAMS:
        core.finish_step()
    core.submit("long", range(200, 200 + CHUNKS * CHUNK), max_tokens=4)
    core.submit("short", range(100, 110), max_tokens=4)
    seen, first_at = len(core.plans), {}
    while "long" not in core.outputs:
        core.finish_step()
        for request_id in core.outputs:
            first_at.setdefault(request_id, len(core.plans))
    plans = core.plans[seen:]
    for plan in plans:
        decodes = [row for row in plan.rows if row.tokens_count == 1 and row.sampled]
        chunks = sum(row.tokens_count for row in plan.rows) - len(decodes)
        assert len(decodes) >= STREAMS, "a stream stood still"
        assert chunks <= CHUNK
    assert len(plans) <= CHUNKS + 1 + config.pipeline_depth
    assert first_at["short"] < first_at["long"]
    core.finish_all()
    assert core.outputs["long"] == reference(range(200, 200 + CHUNKS * CHUNK), 4)


@dataclass
class Stream:
    """When each token of a streamed answer came, by the monotonic clock. busy: five came."""

    times: list[float] = dataclass_field(default_factory=list)
    busy: threading.Event = dataclass_field(default_factory=threading.Event)

    def read(self, cluster: FieldCluster, prompt: list[int], max_tokens: int) -> float:
        """Returns the time to the first token."""
        started_at = monotonic()
        request = cluster.grpc_request(prompt, max_tokens=max_tokens, ignore_eos=True)
        for message in cluster.client.inference.Generate(request, timeout=60):
            self.times += [monotonic()] * len(message.token_ids)
            if len(self.times) >= 5:
                self.busy.set()
        return self.times[0] - started_at

    def between(self, start: float, end: float) -> int:
        """Tokens that came meanwhile."""
        return sum(start <= each <= end for each in self.times)

    def largest_gap(self, start: float, end: float) -> float:
        """Longest wait for a token meanwhile."""
        times = [start, *(each for each in self.times if start < each < end), end]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.end_to_end
@pytest.mark.quiet
def test_streams_go_on_beside_a_long_prompt(field: FieldCluster) -> None:
    """Medians over the rounds: what else the machine does must not decide."""
    tokens, gaps, long_times, short_times = [], [], [], []
    for round_index in range(ROUNDS):
        streams = [Stream() for _ in range(STREAMS)]
        long, short = Stream(), Stream()
        with ThreadPoolExecutor(STREAMS + 2) as pool:
            for index, stream in enumerate(streams):
                prompt = random_ids(("cp03", round_index, index), 8)
                pool.submit(stream.read, field, prompt, 100)
            for stream in streams:
                assert stream.busy.wait(60)
            sent_at = monotonic()
            prompt = random_ids(("cp03 long", round_index), LONG_TOKENS)
            reading = pool.submit(long.read, field, prompt, 4)
            prompt = random_ids(("cp03 short", round_index), 8)
            short_times.append(pool.submit(short.read, field, prompt, 4).result())
            long_times.append(reading.result())
        tokens += [stream.between(sent_at, long.times[0]) for stream in streams]
        gaps += [stream.largest_gap(sent_at, long.times[0]) for stream in streams]
        field.client.flush()
    # A token a step; those of the first step may have been on their way, those of the last be late.
    assert statistics.median(tokens) >= CHUNKS - 2
    assert statistics.median(short_times) < statistics.median(long_times)
    chunk_s = statistics.median(long_times) / CHUNKS
    assert statistics.median(gaps) <= 3 * chunk_s
