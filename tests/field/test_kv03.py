"""KV03: a retracted request loses or repeats part of its answer, or is retracted without end.

Here it is computed again from prompt and output, with the same draws: nobody sees a difference.
"""

import random
from collections.abc import Mapping
from functools import partial

import pytest

from tests.field.answers import Answer
from tests.field.field_cluster import (
    LOGPROB_TOLERANCE,
    PROTOCOLS,
    FieldCluster,
    together,
)
from tests.field.prompts import random_ids
from tests.field.shared_specs import SCARCE

pytestmark = pytest.mark.end_to_end

CLUSTER = SCARCE
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 80
RETRACTIONS_MAX = 5
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.9, "seed": 12, **PENALTIES},
    {"temperature": 1.3, "seed": 13, "n": 2},
    {"temperature": 0.8, "seed": 14, "top_k": 20, "top_p": 0.95},
    {**PENALTIES, "logit_bias": {7: 2.0}},
]
"""What the six requests ask for. Log-probabilities are asked for by `ask` itself."""


@pytest.mark.parametrize("first", range(len(PROTOCOLS)))
def test_a_retracted_answer_is_the_undisturbed_one(field: FieldCluster, first: int) -> None:
    """Six at once where three fit; `first` turns round which protocol each of them takes."""
    prompts = [random_ids(("kv03", index), PROMPT_TOKENS) for index in range(len(KINDS))]
    alone = []
    for prompt, kind in zip(prompts, KINDS, strict=True):
        field.client.flush()
        alone.append(ask(field, "grpc", prompt, kind))
    field.client.flush()
    retracted = field.status().groups[0].retracted
    protocols = [PROTOCOLS[(first + index) % len(PROTOCOLS)] for index in range(len(KINDS))]
    order = random.Random(first).sample(range(len(KINDS)), len(KINDS))
    crowded = together(
        *(partial(ask, field, protocols[index], prompts[index], KINDS[index]) for index in order)
    )
    for index, answer in zip(order, crowded, strict=True):
        check_same(answer, alone[index])
        assert answer.retractions <= RETRACTIONS_MAX * len(answer.choices)
    counted = field.status().groups[0].retracted - retracted
    assert counted > 0, "the scenario did not run out of blocks"
    assert counted == sum(answer.retractions for answer in crowded)


def ask(
    field: FieldCluster, protocol: str, prompt: list[int], kind: Mapping[str, object]
) -> Answer:
    parameters = dict(kind)
    bias = parameters.get("logit_bias")
    if protocol != "grpc" and isinstance(bias, Mapping):
        parameters["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    return field.ask(protocol, prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, **parameters)


def check_same(answer: Answer, expected: Answer) -> None:
    """Every choice: ids, text, log-probabilities, reason; and the counts of the whole."""
    assert len(answer.choices) == len(expected.choices)
    for choice, other in zip(answer.choices, expected.choices, strict=True):
        assert choice.ids == other.ids
        assert choice.text == other.text
        assert choice.finish == other.finish == "length"
        assert len(choice.ids) == len(choice.logprobs) == OUTPUT_TOKENS
        pairs = zip(choice.logprobs, other.logprobs, strict=True)
        assert max(abs(one - two) for one, two in pairs) <= LOGPROB_TOLERANCE
    assert answer.prompt_tokens == PROMPT_TOKENS
    assert answer.completion_tokens == expected.completion_tokens
