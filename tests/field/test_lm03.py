"""LM03: off by one where the prompt is as long as the context; the error states a wrong limit.

Here a prompt leaves room for one token at least, or is refused with the true limit. Prompt and
max_tokens together above the context are refused too, not cut: who asks for 20 tokens gets 20.
"""

import re

import grpc
import pytest

from tests.field.answers import Answer, Refused
from tests.field.field_cluster import CONTEXT, PROTOCOLS, FieldCluster, Prompt, is_chat

pytestmark = pytest.mark.end_to_end

CHAT_FRAME = "<|start|>user: {}<|turn_end|>\nassistant:"


def prompts_of(field: FieldCluster, tokens_count: int) -> list[Prompt]:
    """The three kinds of prompt, each of exactly so many tokens."""
    text = " the" * (tokens_count - 1)
    ids = field.ids_of(text)
    frame = field.tokenizer.encode(CHAT_FRAME.format(""), add_special=False)
    content = " the" * (tokens_count - len(frame))
    rendered = field.tokenizer.encode(CHAT_FRAME.format(content), add_special=False)
    assert len(ids) == len(rendered) == tokens_count
    return [ids, text, [{"role": "user", "content": content}]]


def ask(
    field: FieldCluster, protocol: str, prompt: Prompt, max_tokens: int | None
) -> Answer | Refused:
    try:
        return field.ask(protocol, prompt, max_tokens=max_tokens, ignore_eos=True)
    except Refused as refused:
        return refused


def check_refused(answer: Answer | Refused, names: set[str], numbers: list[int]) -> None:
    """Refused as a bad request; the message has these numbers, in this order and no others."""
    assert isinstance(answer, Refused), "it was answered"
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.status in (400, None)
    assert answer.parameter in names
    assert [int(each) for each in re.findall(r"\d+", answer.message)] == numbers


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_prompts_about_as_long_as_the_context(field: FieldCluster, protocol: str) -> None:
    for max_tokens in (1, None):
        for prompt in prompts_of(field, CONTEXT - 1):
            answer = ask(field, protocol, prompt, max_tokens)
            assert isinstance(answer, Answer), answer
            assert answer.prompt_tokens == CONTEXT - 1
            assert (len(answer.ids), answer.finish) == (1, "length")
        for tokens_count in (CONTEXT, CONTEXT + 1):
            for prompt in prompts_of(field, tokens_count):
                name = "messages" if is_chat(prompt) else "prompt"
                check_refused(
                    ask(field, protocol, prompt, max_tokens),
                    {name},
                    [tokens_count, CONTEXT, CONTEXT - 1],
                )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_prompt_and_output_together(field: FieldCluster, protocol: str) -> None:
    prompt_tokens = 200
    room = CONTEXT - prompt_tokens
    for prompt in prompts_of(field, prompt_tokens):
        answer = ask(field, protocol, prompt, room)
        assert isinstance(answer, Answer), answer
        assert (len(answer.ids), answer.finish) == (room, "length")
        unset = ask(field, protocol, prompt, None)
        assert isinstance(unset, Answer)
        assert (unset.ids, unset.finish) == (answer.ids, "length")
        check_refused(
            ask(field, protocol, prompt, room + 1),
            {"max_tokens"},
            [prompt_tokens, room + 1, CONTEXT, room],
        )


@pytest.mark.parametrize("protocol", ["http", "http-stream"])
def test_the_newer_name_of_max_tokens(field: FieldCluster, protocol: str) -> None:
    (ids, *_) = prompts_of(field, 200)
    with pytest.raises(Refused) as caught:
        field.ask(protocol, ids, max_completion_tokens=57)
    check_refused(caught.value, {"max_completion_tokens"}, [200, 57, CONTEXT, 56])
