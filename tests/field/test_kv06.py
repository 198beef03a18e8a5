"""KV06: the use of KV memory ratchets up over finished requests, or shared blocks count twice.

Here one way out gives blocks back for every request, and the books are tried to close after each
round of mixed ones: shared beginnings, clients that leave, refusals, several choices, stops.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.field.answers import Refused, grpc_refusal
from tests.field.field_cluster import (
    IDLE_DEADLINE_S,
    POOL_BLOCKS,
    PROTOCOLS,
    FieldCluster,
    idle_problem,
)
from tests.field.prompts import random_ids
from tests.field.scrape import scrape

pytestmark = pytest.mark.end_to_end

REQUESTS = 2000
ROUNDS = 10
CONCURRENCY = 8
KINDS = ("plain", "shared", "leaves", "refused", "choices", "stops", "scored", "salted")


def test_the_books_close_after_every_round(
    field: FieldCluster, counted: Callable[[int], int]
) -> None:
    field.check_alive()
    before = scrape(field)
    each_round = counted(REQUESTS) // ROUNDS
    used: list[int] = []
    for round_index in range(ROUNDS):
        seeds = [f"kv06 {round_index} {index}" for index in range(each_round)]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(lambda seed: run(field, seed), seeds))
        wait_until_idle(field)
        used.append(field.status().groups[0].blocks.cached)
    assert max(used) > POOL_BLOCKS // 2, "the cache was hardly used"
    after = scrape(field)
    after.check_reconciled()
    assert after.total("num_requests_open") == 0
    received = after.total("requests_received") - before.total("requests_received")
    # One that leaves before it is read has not come.
    assert 0 < received <= counted(REQUESTS)
    field.check_idle()
    field.check_alive()


def wait_until_idle(field: FieldCluster) -> None:
    """The books, with what is cached."""
    deadline = time.monotonic() + IDLE_DEADLINE_S
    while (problem := idle_problem(field.status())) is not None:
        assert time.monotonic() < deadline, problem
        time.sleep(0.02)


def run(field: FieldCluster, seed: str) -> None:
    """One request of a random kind, to the end that kind must have."""
    generator = random.Random(seed)
    kind = generator.choice(KINDS)
    protocol = generator.choice(PROTOCOLS)
    prompt = random_ids(seed, generator.randrange(2, 80))
    parameters: dict[str, object] = {"max_tokens": generator.randrange(2, 30)}
    match kind:
        case "shared":
            shared = random_ids(("kv06 shared", generator.randrange(3)), 48)
            prompt = shared[: generator.choice([16, 31, 32, 48])] + prompt[:20]
        case "leaves":
            leave(field, protocol, prompt, generator.randrange(4))
            return
        case "refused":
            with pytest.raises(Refused) as caught:
                field.ask(protocol, prompt, **(parameters | bad_field(generator)))
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
            return
        case "choices":
            parameters |= {"n": 2, "temperature": 1.0, "seed": generator.randrange(100)}
        case "stops":
            parameters |= {"stop": ["e", " t", "qu"], "stop_token_ids": [40, 41, 42]}
        case "scored" if protocol != "http-stream":
            parameters |= {"prompt_logprobs": 1}
        case "salted":
            parameters |= {"cache_salt": generator.choice("ab")}
    answer = field.ask(protocol, prompt, **parameters)
    finishes = {choice.finish for choice in answer.choices}
    assert finishes <= {"stop", "length"}
    assert len(answer.choices) == (2 if kind == "choices" else 1)
    assert answer.completion_tokens == sum(len(choice.ids) for choice in answer.choices)
    assert answer.prompt_tokens == len(prompt)


def bad_field(generator: random.Random) -> dict[str, object]:
    """A field that is refused."""
    return generator.choice(
        [
            {"temperature": -1.0},
            {"stop": [""]},
            {"top_p": 1.5},
            {"max_tokens": 10_000},
            {"n": 1000},
        ]
    )


def leave(field: FieldCluster, protocol: str, prompt: list[int], pieces: int) -> None:
    """Reads so many pieces of a long answer and goes."""
    if protocol == "grpc":
        request = field.grpc_request(prompt, max_tokens=100, ignore_eos=True)
        call = field.client.inference.Generate(request, timeout=60)
        try:
            for _ in zip(range(pieces), call, strict=False):
                pass
        except grpc.RpcError as error:
            raise grpc_refusal(error) from error
        call.cancel()
        return
    path, body = field.http_request(prompt, max_tokens=100, ignore_eos=True)
    with field.open_stream(path, body) as response:
        assert response.status_code == 200
        for _ in zip(range(pieces), response.iter_lines(), strict=False):
            pass
