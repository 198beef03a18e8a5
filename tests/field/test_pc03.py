"""PC03: a prompt that is wholly cached gets another answer than a cold one, and repeats get worse.

Here at least the last token is always computed, and a shared block is never written.
"""

import pytest

from tests.field.field_cluster import BLOCK, PROTOCOLS, FieldCluster, check_equal
from tests.field.prompts import random_ids

pytestmark = pytest.mark.end_to_end

OUTPUT_TOKENS = 6
REPEATS = 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_full_hit_answers_like_a_cold_prompt(
    field: FieldCluster, protocol: str, blocks: int, offset: int
) -> None:
    length = blocks * BLOCK + offset
    ids = random_ids(("pc03", protocol, blocks, offset), length + 1)
    expected = {
        size: field.oracle(ids[:size], OUTPUT_TOKENS) for size in range(length - 1, length + 2)
    }

    def ask(size: int, cached_tokens: int) -> None:
        answer = field.ask(protocol, ids[:size], max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        check_equal(answer, expected[size])
        assert (answer.prompt_tokens, answer.cached_tokens) == (size, cached_tokens)

    ask(length, 0)
    for _ in range(REPEATS - 1):
        ask(length, (length - 1) // BLOCK * BLOCK)
    for size in (length + 1, length - 1, length):
        ask(size, (size - 1) // BLOCK * BLOCK)
