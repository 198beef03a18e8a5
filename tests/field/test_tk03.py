"""TK03: the start token is added once or twice depending on the endpoint."""

import pytest

from tests.fakes.field_tokenizers import START
from tests.field.field_cluster import PROTOCOLS, FieldCluster, Prompt
from tests.field.shared_specs import MIX, SENTENCEPIECE_NO_SYSTEM, STARTLESS_ALTERNATING

pytestmark = pytest.mark.end_to_end

TOKENS = 4
MESSAGES = [
    {"role": "user", "content": "the quick brown fox"},
    {"role": "assistant", "content": "jumps"},
    {"role": "user", "content": "please stop"},
]
RENDERED = (
    "<|start|>user: the quick brown fox<|turn_end|>\nassistant: jumps<|turn_end|>\n"
    "user: please stop<|turn_end|>\nassistant:"
)
SPECS = {"bytes": MIX, "sentencepiece": SENTENCEPIECE_NO_SYSTEM}


def check_prompt(field: FieldCluster, protocol: str, prompt: Prompt, expected: list[int]) -> None:
    answer = field.ask(protocol, prompt, max_tokens=TOKENS, ignore_eos=True)
    assert answer.prompt_ids == expected
    assert answer.prompt_tokens == len(expected)
    assert answer.ids == field.ask("grpc", expected, max_tokens=TOKENS, ignore_eos=True).ids


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", SPECS.values(), ids=SPECS, indirect=True)
def test_one_start_token_however_it_is_sent(field: FieldCluster, protocol: str) -> None:
    template_ids = field.tokenizer.encode(RENDERED, add_special=False)
    assert template_ids.count(START) == 1
    check_prompt(field, protocol, MESSAGES, template_ids)
    # Text that begins with the start token is not given another.
    check_prompt(field, protocol, RENDERED, template_ids)
    plain = field.tokenizer.encode("the quick brown fox", add_special=False)
    check_prompt(field, protocol, "the quick brown fox", [START, *plain])


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", SPECS.values(), ids=SPECS, indirect=True)
def test_token_ids_are_taken_as_they_are(field: FieldCluster, protocol: str) -> None:
    plain = field.tokenizer.encode("the quick brown fox", add_special=False)
    for ids in (plain, [START, *plain], [START, START, *plain], [START]):
        check_prompt(field, protocol, ids, ids)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", [STARTLESS_ALTERNATING], ids=["startless"], indirect=True)
def test_a_model_without_a_start_token_gets_none(field: FieldCluster, protocol: str) -> None:
    plain = field.ids_of("the quick brown fox")
    assert START not in plain
    check_prompt(field, protocol, "the quick brown fox", plain)
    rendered = RENDERED.removeprefix("<|start|>")
    check_prompt(field, protocol, MESSAGES, field.ids_of(rendered))
