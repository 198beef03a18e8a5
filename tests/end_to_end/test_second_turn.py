"""A second turn over the first's cached blocks gives what a cold process gives.

Goal: every edge of block and end. The first turn's prompt and output together are m blocks plus or
minus a token, ended by length and by a stop token; the second turn is that text and 8 more ids.
"""

import random

import pytest

from tests.end_to_end.cluster import ORDINARY, Clusters
from tests.end_to_end.generation import Client, request_of

BLOCK = 16
OUTPUT = 5
EXTRA = 8
ANSWER = 8
TURNS = [
    (blocks * BLOCK + offset, ending)
    for blocks in range(2, 6)
    for offset in (-1, 0, 1)
    for ending in ("length", "stop")
]
OPTIONS = ("--groups", "1", "--dtype", "float32", "--chunk-tokens", "16", "--prefix-cache", "off")


def find_prompt(client: Client, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt whose last output token did not occur before it, so that it can be a stop token."""
    for _ in range(50):
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        output = client.generate(request_of(prompt, OUTPUT)).ids
        if output[-1] not in output[:-1]:
            return prompt, output
    raise AssertionError("no prompt with a fresh last token in 50 tries")


@pytest.mark.end_to_end
def test_second_turn_equals_cold(clusters: Clusters) -> None:
    rng = random.Random(7)
    cold = clusters.client(*OPTIONS)
    turns = []
    for total, ending in TURNS:
        prompt, output = find_prompt(cold, total - OUTPUT, rng)
        second = [*prompt, *output, *(rng.randrange(1000, 40000) for _ in range(EXTRA))]
        expected = cold.generate(request_of(second, ANSWER))
        assert expected.usage is not None
        assert expected.usage.cached_tokens == 0
        turns.append((ending, prompt, output, second, expected.ids))

    warm = clusters.client(*ORDINARY)
    for ending, prompt, output, second, expected_ids in turns:
        warm.flush()
        if ending == "length":
            first = warm.generate(request_of(prompt, OUTPUT))
        else:
            first = warm.generate(request_of(prompt, OUTPUT + 20, stop_ids=[output[-1]]))
        assert first.ids == output
        answer = warm.generate(request_of(second, ANSWER))
        assert answer.ids == expected_ids
        assert answer.usage is not None
        known = len(prompt) + len(output)
        assert answer.usage.cached_tokens == (known - 1) // BLOCK * BLOCK, (known, ending)
