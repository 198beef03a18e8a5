"""A second turn over the first's cached blocks gives what a cold process gives.

Goal: every edge of block and end. The first turn's prompt and output together are m blocks plus or
minus a token, ended by length and by a stop token; the second turn is that text and 8 more ids.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.end_to_end.cluster import ORDINARY, Clusters
from tests.end_to_end.generation import Client, request_of

BLOCK = 16
OUTPUT = 5
EXTRA = 8
ANSWER = 8
AT_A_TIME = 8
"""Conversations; no two begin alike."""
TURNS = [
    (blocks * BLOCK + offset, ending)
    for blocks in range(2, 6)
    for offset in (-1, 0, 1)
    for ending in ("length", "stop")
]
OPTIONS = ("--groups", "1", "--dtype", "float32", "--chunk-tokens", "16", "--prefix-cache", "off")


@dataclass(frozen=True)
class Turns:
    """Two turns of a conversation, and what a cold process says to each."""

    ending: str
    prompt: list[int]
    output: list[int]
    second: list[int]
    answer: list[int]


def find_prompt(client: Client, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt whose last output token did not occur before it, so that it can be a stop token."""
    for _ in range(50):
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        output = client.generate(request_of(prompt, OUTPUT)).ids
        if output[-1] not in output[:-1]:
            return prompt, output
    raise AssertionError("no prompt with a fresh last token in 50 tries")


def ask_cold(client: Client, total: int, ending: str) -> Turns:
    rng = random.Random(f"{total} {ending}")
    prompt, output = find_prompt(client, total - OUTPUT, rng)
    second = [*prompt, *output, *(rng.randrange(1000, 40000) for _ in range(EXTRA))]
    answer = client.generate(request_of(second, ANSWER))
    assert answer.usage is not None
    assert answer.usage.cached_tokens == 0
    return Turns(ending, prompt, output, second, answer.ids)


def check_warm(client: Client, turns: Turns) -> None:
    first = request_of(turns.prompt, OUTPUT)
    if turns.ending == "stop":
        first = request_of(turns.prompt, OUTPUT + 20, stop_ids=[turns.output[-1]])
    assert client.generate(first).ids == turns.output
    answer = client.generate(request_of(turns.second, ANSWER))
    assert answer.ids == turns.answer
    assert answer.usage is not None
    known = len(turns.prompt) + len(turns.output)
    assert answer.usage.cached_tokens == (known - 1) // BLOCK * BLOCK, (known, turns.ending)


@pytest.mark.end_to_end
def test_second_turn_equals_cold(clusters: Clusters) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        cold = clusters.client(*OPTIONS)
        every = list(pool.map(lambda each: ask_cold(cold, *each), TURNS))
        warm = clusters.client(*ORDINARY)
        warm.flush()
        list(pool.map(lambda turns: check_warm(warm, turns), every))
