"""CT01: a template that refuses, none at all, or one in a file of its own."""

import grpc
import pytest

from tests.field.answers import Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.shared_specs import (
    NO_TEMPLATE,
    SENTENCEPIECE_NO_SYSTEM,
    STARTLESS_ALTERNATING,
)

pytestmark = pytest.mark.end_to_end

SYSTEM = {"role": "system", "content": "please stop"}
USER = {"role": "user", "content": "the quick brown fox"}
ASSISTANT = {"role": "assistant", "content": "jumps"}
TOKENS = 4


def refusal(field: FieldCluster, protocol: str, messages: list[dict[str, str]]) -> Refused:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, messages, max_tokens=TOKENS)
    refused = caught.value
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.status in (400, None)
    assert refused.parameter == "messages"
    for trace in ("Traceback", "File ", ".py", "jinja2"):
        assert trace not in refused.message
    return refused


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", [SENTENCEPIECE_NO_SYSTEM], ids=["apart"], indirect=True)
def test_a_template_in_its_own_file_is_used_and_may_refuse_a_role(
    field: FieldCluster, protocol: str
) -> None:
    refused = refusal(field, protocol, [SYSTEM, USER])
    assert "a system role is not supported" in refused.message
    answer = field.ask(protocol, [USER], max_tokens=TOKENS, ignore_eos=True)
    rendered = f"<|start|>user: {USER['content']}<|turn_end|>\nassistant:"
    assert answer.prompt_ids == field.tokenizer.encode(rendered, add_special=False)
    assert answer.completion_tokens == TOKENS


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", [STARTLESS_ALTERNATING], ids=["alternating"], indirect=True)
def test_roles_that_do_not_alternate(field: FieldCluster, protocol: str) -> None:
    for messages in ([USER, USER], [ASSISTANT], [USER, ASSISTANT, ASSISTANT]):
        refused = refusal(field, protocol, messages)
        assert "roles must alternate user/assistant" in refused.message
    good = [USER, ASSISTANT, USER]
    assert field.ask(protocol, good, max_tokens=TOKENS, ignore_eos=True).finish == "length"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", [NO_TEMPLATE], ids=["none"], indirect=True)
def test_without_a_template_completion_works(field: FieldCluster, protocol: str) -> None:
    refused = refusal(field, protocol, [USER])
    assert "no chat template" in refused.message
    answer = field.ask(protocol, USER["content"], max_tokens=TOKENS, ignore_eos=True)
    assert answer.completion_tokens == TOKENS
