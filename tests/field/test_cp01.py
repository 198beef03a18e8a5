"""CP01: a prompt of three or more chunks is taken as finished too early.

Here only the step that reaches the last known token draws, so chunks cannot be seen in an answer.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import pytest

from tests.fakes.dense_llama import dense_logits
from tests.fakes.field_models import FieldModel
from tests.field.answers import Answer
from tests.field.field_cluster import CHUNK, PROTOCOLS, FieldCluster, check_equal
from tests.field.prompts import random_ids

pytestmark = pytest.mark.end_to_end

OUTPUT_TOKENS = 5
LENGTHS = [chunks * CHUNK + offset for chunks in range(1, 6) for offset in (-1, 0, 1)]
DECODERS = 3


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-decoders"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prompt_in_chunks_answers_like_one_at_once(
    field: FieldCluster, protocol: str, beside: bool
) -> None:
    with decoders(field) if beside else nobody() as running:
        for length in LENGTHS:
            prompt = random_ids(("cp01", length), length)
            answer = field.ask(
                protocol, prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, cache_salt=protocol
            )
            expected = at_once(field.spec.model, tuple(prompt), tuple(answer.ids))
            assert answer.ids == expected, f"{length} tokens"
            assert len(answer.ids) == OUTPUT_TOKENS
            assert (answer.prompt_tokens, answer.cached_tokens) == (length, 0)
            assert answer.prompt_ids == prompt
            assert len(answer.deltas) <= OUTPUT_TOKENS
            field.client.flush()
    for index, answers in enumerate(running):
        assert answers, "no decoder came to its end beside the prompts"
        for one in answers:
            check_equal(one, field.oracle(decoder_prompt(index), 100))


@cache
def at_once(model: FieldModel, prompt: tuple[int, ...], ids: tuple[int, ...]) -> list[int]:
    """The likeliest token at the place of each of `ids`, by an independent implementation that
    takes prompt and `ids` in one piece."""
    logits = dense_logits(model.shape, model.tensors(), [*prompt, *ids])
    return [int(each) for each in logits[len(prompt) - 1 : -1].argmax(dim=-1)]


def decoder_prompt(index: int) -> list[int]:
    return random_ids(("cp01 decoder", index), 10)


@contextmanager
def decoders(field: FieldCluster) -> Iterator[list[list[Answer]]]:
    """Requests that decode one after the other, on three threads, until the block is left."""
    over = threading.Event()

    def decode(index: int) -> list[Answer]:
        answers = []
        while not over.is_set():
            prompt = decoder_prompt(index)
            answers.append(field.ask("grpc", prompt, max_tokens=100, ignore_eos=True))
        return answers

    found: list[list[Answer]] = []
    with ThreadPoolExecutor(DECODERS) as pool:
        running = [pool.submit(decode, index) for index in range(DECODERS)]
        try:
            yield found
        finally:
            over.set()
        found += [each.result() for each in running]


@contextmanager
def nobody() -> Iterator[list[list[Answer]]]:
    yield []
