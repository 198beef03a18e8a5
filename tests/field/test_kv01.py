"""KV01: a request that fits the context but not the KV memory waits for ever, and all behind it.

Here an explicit max_tokens that memory can never hold is refused at admission with the numbers;
without max_tokens the answer ends by length where memory ends. A group has as much as its smallest
chip.
"""

import time
from functools import partial

import grpc
import pytest

from tests.field.answers import Answer, Refused
from tests.field.field_cluster import (
    BLOCK,
    PROTOCOLS,
    ClusterSpec,
    FieldCluster,
    check_equal,
    together,
)
from tests.field.prompts import random_ids

pytestmark = pytest.mark.end_to_end

BLOCKS = {
    8: ClusterSpec(options=("--kv-blocks", "8")),
    6: ClusterSpec(options=("--groups", "2", "--kv-blocks", "8,6")),
}
CASES = [
    pytest.param(spec, blocks * BLOCK, id=f"{blocks}-blocks") for blocks, spec in BLOCKS.items()
]
SMALL_PROMPTS = [random_ids(("kv01", index), 20) for index in range(4)]
SMALL_TOKENS = 10
OUTCOME_DEADLINE_S = 10.0


def ask_big(field: FieldCluster, protocol: str, prompt: list[int], max_tokens: int) -> Refused:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, prompt, max_tokens=max_tokens, ignore_eos=True)
    return caught.value


def ask_small(field: FieldCluster, protocol: str, prompt: list[int]) -> Answer:
    return field.ask(protocol, prompt, max_tokens=SMALL_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("field", "memory_tokens"), CASES, indirect=["field"])
def test_what_memory_can_never_hold_is_refused_and_blocks_nobody(
    field: FieldCluster, protocol: str, memory_tokens: int
) -> None:
    expected = [field.oracle(prompt, SMALL_TOKENS) for prompt in SMALL_PROMPTS]
    prompt = random_ids("kv01 big", memory_tokens - 28)
    started_at = time.monotonic()
    refused, *answers = together(
        partial(ask_big, field, protocol, prompt, 100),
        *(partial(ask_small, field, protocol, each) for each in SMALL_PROMPTS),
    )
    assert time.monotonic() - started_at < OUTCOME_DEADLINE_S
    assert isinstance(refused, Refused)
    assert (refused.code, refused.parameter) == (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens")
    assert str(len(prompt)) in refused.message
    assert "at most 28" in refused.message, "what would fit is not said"
    for answer, one in zip(answers, expected, strict=True):
        assert isinstance(answer, Answer)
        check_equal(answer, one)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("field", "memory_tokens"), CASES, indirect=["field"])
def test_memory_is_used_to_its_end(field: FieldCluster, protocol: str, memory_tokens: int) -> None:
    prompt = random_ids("kv01 end", memory_tokens - 28)
    exact = field.ask(protocol, prompt, max_tokens=28, ignore_eos=True)
    unbounded = field.ask(protocol, prompt, max_tokens=None, ignore_eos=True)
    assert (exact.completion_tokens, exact.finish) == (28, "length")
    assert (unbounded.completion_tokens, unbounded.finish) == (28, "length")
    check_equal(unbounded, exact)
    assert ask_big(field, protocol, prompt, 29).parameter == "max_tokens"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("field", "memory_tokens"), CASES, indirect=["field"])
def test_a_prompt_alone_can_be_too_long(
    field: FieldCluster, protocol: str, memory_tokens: int
) -> None:
    refused = ask_big(field, protocol, random_ids("kv01 long", memory_tokens), 1)
    assert (refused.code, refused.parameter) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert str(memory_tokens) in refused.message
