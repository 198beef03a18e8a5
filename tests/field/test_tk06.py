"""TK06: the second end token is not honoured, its text is shown, a special stop string unseen."""

import pytest

from tests.fakes.field_tokenizers import END, SPECIAL
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.shared_specs import ENDS_CHAIN

pytestmark = pytest.mark.end_to_end

CLUSTER = ENDS_CHAIN


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("trigger", "parameters", "text", "tokens_count", "finish"),
    [
        ("F", {}, " runs from ", 4, "stop"),
        ("F", {"stop_token_ids": [SPECIAL]}, " runs from ", 4, "stop"),
        ("G", {}, " here", 2, "stop"),
        ("G", {"ignore_eos": True, "max_tokens": 3}, " here there", 3, "length"),
        ("G", {"ignore_eos": True, "stop_token_ids": [END]}, " here", 2, "stop"),
        ("G", {"ignore_eos": True, "stop": ["<|end|>"]}, " here", 2, "stop"),
        ("H", {"max_tokens": 5}, " some other small animals", 5, "length"),
        ("H", {"stop_token_ids": [SPECIAL]}, " some other", 3, "stop"),
        ("H", {"stop": ["<|special|>"]}, " some other", 3, "stop"),
        ("H", {"stop": ["<|special|>", " other"]}, " some", 2, "stop"),
    ],
)
def test_ends_and_their_text(
    field: FieldCluster,
    protocol: str,
    trigger: str,
    parameters: dict[str, object],
    text: str,
    tokens_count: int,
    finish: str,
) -> None:
    answer = field.ask(protocol, trigger, **({"max_tokens": 20} | parameters))
    assert (answer.text, answer.finish) == (text, finish)
    assert answer.completion_tokens == len(answer.ids) == tokens_count
    assert answer.ids == field.script(field.tokenizer.id_of(trigger), tokens_count)
