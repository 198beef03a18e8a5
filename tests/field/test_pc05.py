"""PC05: log-probabilities of a prompt fail once a block of it is cached, or depend on neighbours.

Here such a request takes nothing from the cache, and leaves its own blocks out of it.
"""

from functools import partial

import pytest

from protos import inference_pb2
from tests.fakes.dense_llama import dense_logits
from tests.field.field_cluster import (
    CHUNK,
    LOGPROB_TOLERANCE,
    PROTOCOLS,
    FieldCluster,
    together,
)
from tests.field.prompts import random_ids

pytestmark = pytest.mark.end_to_end

LENGTHS = (17, 32, CHUNK + 1, 3 * CHUNK + 7)
"""Above one block, of whole blocks, one token into the second chunk, four chunks."""
PROMPTS = [random_ids(("pc05", length), length) for length in LENGTHS]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scores_are_the_same_cold_warm_and_among_others(field: FieldCluster, protocol: str) -> None:
    expected = [reference(field, prompt) for prompt in PROMPTS]
    for prompt, scores in zip(PROMPTS, expected, strict=True):
        check(scores_of(field, protocol, prompt), scores)  # cold
    for prompt in PROMPTS:
        first = field.ask(protocol, prompt, max_tokens=20, ignore_eos=True)
        assert first.cached_tokens == 0
        assert field.ask(protocol, prompt, max_tokens=1).cached_tokens > 0
    for prompt, scores in zip(PROMPTS, expected, strict=True):
        check(scores_of(field, protocol, prompt), scores)  # warm
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        decoders = [
            partial(decode, field, random_ids(("pc05 other", order, index), 9))
            for index in range(3)
        ]
        asked = [partial(scores_of, field, protocol, PROMPTS[index]) for index in order]
        answers = together(*decoders, *asked)[len(decoders) :]
        for index, scores in zip(order, answers, strict=True):
            check(scores, expected[index])


def decode(field: FieldCluster, prompt: list[int]) -> list[float | None]:
    return [*field.ask("grpc", prompt, max_tokens=30, ignore_eos=True).logprobs]


def scores_of(field: FieldCluster, protocol: str, prompt: list[int]) -> list[float | None]:
    """Log-probability of each token of the prompt; streams over HTTP show it by an echo."""
    if protocol == "http-stream":
        echoed = field.ask(protocol, prompt, max_tokens=2, echo=True, ignore_eos=True)
        assert echoed.cached_tokens == 0
        return [*echoed.logprobs][: len(prompt)]
    answer = field.ask(protocol, prompt, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    assert (answer.cached_tokens, answer.completion_tokens) == (0, 2)
    if protocol == "grpc":
        return scores_of_messages(answer.raw)
    (choice,) = answer.raw[0]["choices"]
    entries = choice["prompt_logprobs"]
    return [
        None if entry is None else entry[str(token_id)]["logprob"]
        for token_id, entry in zip(prompt, entries, strict=True)
    ]


def scores_of_messages(messages: list[inference_pb2.GenerateResponse]) -> list[float | None]:
    scores: list[float | None] = [None]
    for message in messages:
        if message.HasField("prompt_logprobs"):
            assert message.prompt_logprobs.first_index == len(scores), "repeated or skipped"
            scores.extend(message.prompt_logprobs.logprobs)
    return scores


def check(scores: list[float | None], expected: list[float]) -> None:
    assert scores[0] is None
    assert len(scores) == len(expected) + 1
    for place, (score, other) in enumerate(zip(scores[1:], expected, strict=True), 1):
        assert score is not None
        assert abs(score - other) <= LOGPROB_TOLERANCE, f"at {place}: {score}, not {other}"


def reference(field: FieldCluster, prompt: list[int]) -> list[float]:
    """By an independent implementation, all tokens at once, from the second on."""
    model = field.spec.model
    scores = dense_logits(model.shape, model.tensors(), prompt).log_softmax(dim=-1)
    return [float(scores[place, token_id]) for place, token_id in enumerate(prompt[1:])]
