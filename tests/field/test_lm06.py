"""LM06: at the end of the context generation loops for ever; over-long input is now 400, now 500.

Here an answer without an end ends where the context does, with the finish reason length, however
many of them share the memory; and an over-long prompt is always refused alike.
"""

import itertools
from collections import Counter
from functools import partial

import grpc
import pytest

from tests.field.answers import Refused
from tests.field.field_cluster import CONTEXT, PROTOCOLS, FieldCluster, together
from tests.field.shared_specs import ENDLESS_CHAIN

pytestmark = pytest.mark.end_to_end

CLUSTER = ENDLESS_CHAIN
PROMPTS = (
    "x",
    "the y",
    "the quick brown fox x",
    "a",
    "numbers always counting y",
    "b c d",
    "E",
    "",
)
"""All of them with the start token; the pool holds half of what they come to."""
TRIES = 20


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_endless_answer_ends_with_the_context(field: FieldCluster, protocol: str) -> None:
    prompt = field.ids_of("x")
    answer = field.ask(protocol, prompt)
    assert len(answer.ids) == answer.completion_tokens == CONTEXT - len(prompt)
    assert answer.finish == "length"
    assert answer.ids == field.script(prompt[-1], len(answer.ids))


def test_eight_of_them_on_a_small_pool(field: FieldCluster) -> None:
    prompts = [field.ids_of(text) for text in PROMPTS]
    needed = len(prompts) * CONTEXT
    (group,) = field.status().groups
    assert group.blocks.total * group.block_tokens == needed // 2
    protocols = itertools.cycle(PROTOCOLS)
    answers = together(*(partial(field.ask, next(protocols), prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == answer.completion_tokens == CONTEXT - len(prompt)
        assert answer.finish == "length"
        assert answer.ids == field.script(prompt[-1], len(answer.ids))
    assert sum(answer.retractions for answer in answers) > 0, "the pool was not small"
    field.check_alive()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("tokens_count", [CONTEXT, CONTEXT + 1, 20 * CONTEXT])
def test_an_over_long_prompt_is_always_refused_alike(
    field: FieldCluster, protocol: str, tokens_count: int
) -> None:
    text = " the" * (tokens_count - 1)

    def refusal() -> Refused:
        with pytest.raises(Refused) as caught:
            field.ask(protocol, text)
        return caught.value

    refused = [refusal() for _ in range(TRIES // 2)] + together(*[refusal] * (TRIES // 2))
    statuses = Counter((each.code, each.status, each.reason, each.message) for each in refused)
    assert len(statuses) == 1, statuses
    ((code, status, _, _),) = statuses
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert status in (400, None)
