"""OA02: with several choices all deltas had index 0, or the choices were clones of each other.

Each index rebuilds its own choice, choices draw with random numbers of their own, and the prompt
counts once. With a seed the choices are the same whole, streamed and over gRPC.
"""

import json

import pytest

from tests.field.answers import Answer
from tests.field.field_cluster import PROTOCOLS, FieldCluster, Prompt
from tests.field.shared_specs import MIX

pytestmark = pytest.mark.end_to_end

CLUSTER = MIX
CHOICES = 3
TOKENS = 16
SEED = 20
TEXT: Prompt = "the quick brown fox jumps over"
CHAT: Prompt = [{"role": "user", "content": "the quick brown fox"}]
BY_KIND = pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["completion", "chat"])


def ask(field: FieldCluster, protocol: str, prompt: Prompt, **parameters: object) -> Answer:
    wanted = {"n": CHOICES, "temperature": 1.2, "max_tokens": TOKENS, "ignore_eos": True}
    return field.ask(protocol, prompt, **(wanted | parameters))


@BY_KIND
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("seed", [None, SEED])
def test_choices_are_apart_and_whole(
    field: FieldCluster, protocol: str, seed: int | None, prompt: Prompt
) -> None:
    alone = ask(field, protocol, prompt, n=1, seed=SEED)
    answer = ask(field, protocol, prompt, seed=seed)
    assert len(answer.choices) == CHOICES
    assert len({tuple(choice.ids) for choice in answer.choices}) > 1
    for choice in answer.choices:
        raw = b"".join(map(field.tokenizer.text_bytes, choice.ids))
        assert choice.text == raw.decode(errors="replace")
        assert (len(choice.ids), len(choice.logprobs)) == (TOKENS, TOKENS)
        assert choice.finish == "length"
    assert answer.prompt_tokens == alone.prompt_tokens == len(answer.prompt_ids)
    assert answer.completion_tokens == CHOICES * TOKENS
    if seed is not None:
        # Choice 0 is what one choice alone draws, and the others are repeated, too.
        assert answer.seed == seed
        assert answer.choices[0].ids == alone.ids
    # The seed that was drawn is told, and draws the same again.
    again = ask(field, "grpc", prompt, seed=answer.seed)
    assert [each.ids for each in again.choices] == [each.ids for each in answer.choices]
    assert [each.text for each in again.choices] == [each.text for each in answer.choices]


@BY_KIND
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_without_a_seed_differ(field: FieldCluster, protocol: str, prompt: Prompt) -> None:
    answers = [ask(field, protocol, prompt) for _ in range(2)]
    assert answers[0].seed != answers[1].seed
    drawn = [[choice.ids for choice in answer.choices] for answer in answers]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_greedy_choices_are_equal(field: FieldCluster, protocol: str) -> None:
    answer = ask(field, protocol, TEXT, temperature=0)
    expected = field.ask("grpc", TEXT, max_tokens=TOKENS, ignore_eos=True).ids
    assert [choice.ids for choice in answer.choices] == [expected] * CHOICES


def test_choices_of_several_prompts_are_in_their_order(field: FieldCluster) -> None:
    """Choice i * n + j is choice j of prompt i; every prompt counts once."""
    prompts = ["the quick brown fox", "hello world"]
    alone = [ask(field, "http", prompt, seed=SEED) for prompt in prompts]
    _, body = field.http_request(
        TEXT, n=CHOICES, temperature=1.2, max_tokens=TOKENS, ignore_eos=True, seed=SEED
    )
    body["prompt"] = prompts
    response = field.http.post("/v1/completions", json=body)
    assert response.status_code == 200
    whole = json.loads(response.text)
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * CHOICES))
    expected = [choice.ids for answer in alone for choice in answer.choices]
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == sum(answer.prompt_tokens for answer in alone)
    assert whole["usage"]["completion_tokens"] == 2 * CHOICES * TOKENS
    streamed: dict[int, list[int]] = {}
    for chunk in field.stream("/v1/completions", body).chunks:
        for choice in chunk["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[index] for index in range(2 * CHOICES)] == expected
