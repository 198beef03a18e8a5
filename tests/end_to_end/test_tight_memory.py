"""Sixteen requests over 64 blocks, half of what they need: all finish with their own text."""

import random
import time

import pytest

from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import request_of

BLOCKS = 64
REQUESTS = 16
PROMPT = 60
OUTPUT = 50
RETRACTIONS_MAX = 5
AT_EASE = 8
"""Requests that fit, with their whole answers."""
OPTIONS = (
    *("--groups", "1", "--dtype", "float32", "--kv-blocks", str(BLOCKS)),
    # All run at once, however slow the machine: a slow one would admit them one after the other.
    *("--decode-latency-target", "0"),
)


@pytest.mark.end_to_end
def test_more_than_memory_holds(clusters: Clusters) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(REQUESTS)]
    client = clusters.client(*OPTIONS)
    undisturbed = []
    for first in range(0, REQUESTS, AT_EASE):
        client.flush()
        few = prompts[first : first + AT_EASE]
        undisturbed += client.generate_all([request_of(prompt, OUTPUT) for prompt in few])
    assert client.status().groups[0].retracted == 0, "so many were to fit"
    client.flush()

    together = client.generate_all([request_of(prompt, OUTPUT) for prompt in prompts])
    for one, many in zip(undisturbed, together, strict=True):
        assert many.ids == one.ids
        assert many.text == one.text
    retractions = [answer.usage.retractions for answer in together if answer.usage is not None]
    assert max(retractions) <= RETRACTIONS_MAX
    assert min(retractions) == 0, "the oldest is never retracted"

    time.sleep(1.0)
    group = client.status().groups[0]
    assert group.retracted > 0, "the scenario did not run out of blocks"
    assert group.blocks.total == BLOCKS
    assert group.blocks.referenced == 0
    assert group.blocks.free + group.blocks.cached == BLOCKS
    client.flush()
    assert client.status().groups[0].blocks.free == BLOCKS
