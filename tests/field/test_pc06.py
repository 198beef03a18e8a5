"""PC06: one cache layer keeps tenants apart and the next does not, or joined keys collide.

Here the salt is a part of the index's root of its own, beside the model and the adapter.
"""

import pytest

from tests.field.field_cluster import PROTOCOLS, FieldCluster, check_equal
from tests.field.prompts import random_ids

pytestmark = pytest.mark.end_to_end

PROMPT_TOKENS = 40
CACHED_TOKENS = 32
OUTPUT_TOKENS = 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_shared_across_salts(field: FieldCluster, protocol: str) -> None:
    prompt = random_ids(("pc06", protocol), PROMPT_TOKENS)
    expected = field.oracle(prompt, OUTPUT_TOKENS)

    def ask(salt: str | None, asked: str = protocol) -> int:
        answer = field.ask(
            asked, prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, cache_salt=salt
        )
        check_equal(answer, expected)
        return answer.cached_tokens

    assert [ask("A"), ask("A")] == [0, CACHED_TOKENS]
    assert [ask("B"), ask("B")] == [0, CACHED_TOKENS]
    assert [ask(None), ask(None)] == [0, CACHED_TOKENS]
    # A salt is the same whatever protocol brings it, and an empty one is none.
    assert [ask("A", other) for other in PROTOCOLS] == [CACHED_TOKENS] * len(PROTOCOLS)
    assert ask("") == CACHED_TOKENS


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_salts_that_look_alike_joined_are_different(field: FieldCluster, protocol: str) -> None:
    """All pairs of salt and text spell the same; the model's names and odd signs are salts, too."""
    text = f"abc {protocol} the quick brown fox jumps over the lazy dog and then it runs away"
    for size in range(4):
        for joined in (text[:size], text[:size] + "\0", text[:size] + "/"):
            prompt = text[size:]
            assert field.ask(protocol, prompt, max_tokens=1, cache_salt=joined).cached_tokens == (0)
    prompt_ids = random_ids(("pc06 joined", protocol), PROMPT_TOKENS)
    for salt in (None, "a", "ab", "default", "0", "/", "default/0", str(prompt_ids[0]), "a\0b"):
        answer = field.ask(protocol, prompt_ids, max_tokens=1, cache_salt=salt)
        assert answer.cached_tokens == 0, f"the salt {salt!r} met another's blocks"
    assert field.ask(protocol, prompt_ids, max_tokens=1, cache_salt="a").cached_tokens > 0
