"""JSON bodies as calls of the intake, and what is no such body."""

import json
from dataclasses import replace

import pytest

from control_plane.errors import InvalidRequest
from control_plane.intake.generation_input import (
    ChatPrompt,
    GenerationInput,
    TextPrompt,
    TokenPrompt,
)
from control_plane.intake.http_schema import HttpCall, read_chat, read_completion

VALUES_MAX = 1 << 20
HELLO = [{"role": "user", "content": "hi"}]


def completion(**body):
    return read_completion(json.dumps({"prompt": "hi"} | body).encode(), VALUES_MAX)


def chat(**body):
    return read_chat(json.dumps({"messages": HELLO} | body).encode(), VALUES_MAX)


def test_a_bare_body_asks_for_the_defaults():
    wanted = GenerationInput(prompts=(TextPrompt("hi"),))
    assert completion() == HttpCall(wanted, field_names={"top_logprobs": "logprobs"})
    messages = ({"role": "user", "content": "hi"},)
    assert chat() == HttpCall(GenerationInput(prompts=(ChatPrompt(messages),)))


COMMON = {
    "model": "tiny",
    "n": 2,
    "temperature": 1,
    "top_k": 5,
    "top_p": 1,
    "min_p": 0.25,
    "presence_penalty": -1,
    "frequency_penalty": 0.5,
    "repetition_penalty": 2,
    "logit_bias": {"0": 1, "17": -2.5},
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "min_tokens": 1,
    "max_tokens": 9,
    "ignore_eos": True,
    "priority": -3,
    "cache_salt": "s",
}
COMMON_WANTED = {
    "model": "tiny",
    "n": 2,
    "temperature": 1.0,
    "top_k": 5,
    "top_p": 1.0,
    "min_p": 0.25,
    "presence_penalty": -1.0,
    "frequency_penalty": 0.5,
    "repetition_penalty": 2.0,
    "logit_bias": {0: 1.0, 17: -2.5},
    "seed": 7,
    "stop": ("a", "b"),
    "stop_token_ids": (3,),
    "min_tokens": 1,
    "max_tokens": 9,
    "ignore_eos": True,
    "priority": -3,
    "cache_salt": "s",
}


@pytest.mark.parametrize("ask", [completion, chat])
def test_every_common_field_arrives(ask):
    wanted = ask(**COMMON).wanted
    assert {name: getattr(wanted, name) for name in COMMON_WANTED} == COMMON_WANTED


@pytest.mark.parametrize("ask", [completion, chat])
def test_null_is_the_default_of_every_field(ask):
    names = [*COMMON, "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs"]
    names += ["echo", "stream", "stream_options", "return_token_ids", "best_of", "user", "tools"]
    assert ask(**dict.fromkeys(names)) == ask()


def test_the_newer_name_of_max_tokens_wins_and_is_the_one_errors_use():
    assert chat(max_completion_tokens=5).wanted.max_tokens == 5
    both = chat(max_completion_tokens=5, max_tokens=6)
    assert both.wanted.max_tokens == 5
    assert both.field_names["max_tokens"] == "max_completion_tokens"
    assert "max_tokens" not in chat(max_tokens=6).field_names


def test_logprobs_of_conversations():
    call = chat(logprobs=True, top_logprobs=3)
    assert (call.wanted.logprobs, call.wanted.top_tokens) == (True, 3)
    assert not chat(logprobs=False).wanted.logprobs


@pytest.mark.parametrize("number", [0, 5])
def test_logprobs_of_completions(number):
    call = completion(logprobs=number, echo=True)
    assert (call.wanted.logprobs, call.wanted.top_tokens) == (True, number)
    assert call.wanted.echo
    assert call.field_names["top_logprobs"] == "logprobs"


@pytest.mark.parametrize("ask", [completion, chat])
def test_prompt_logprobs_but_not_in_a_stream(ask):
    call = ask(prompt_logprobs=0)
    assert call.wanted.prompt_top_tokens == 0
    with pytest.raises(InvalidRequest) as caught:
        ask(prompt_logprobs=0, stream=True)
    assert caught.value.field == "prompt_logprobs"


def test_the_shape_of_a_stream():
    call = chat(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    assert (call.streamed, call.include_usage, call.return_token_ids) == (True, True, True)
    assert not chat(stream=True, stream_options={}).include_usage


def test_the_prompts_are_all_that_is_given_up_once_they_are_read():
    call = completion(**COMMON, return_token_ids=True)
    assert replace(call, wanted=replace(call.wanted, prompts=())) == call.without_prompts()


PROMPTS = [
    ("text", (TextPrompt("text"),)),
    ("", (TextPrompt(""),)),
    (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
    (["a"], (TextPrompt("a"),)),
    ([1, 2], (TokenPrompt((1, 2)),)),
    ([-1, 10**18], (TokenPrompt((-1, 10**18)),)),
    ([], (TokenPrompt(()),)),
    ([[1, 2], [3]], (TokenPrompt((1, 2)), TokenPrompt((3,)))),
    ([[1], []], (TokenPrompt((1,)), TokenPrompt(()))),
    (list(range(100)), (TokenPrompt(tuple(range(100))),)),
]


@pytest.mark.parametrize(("prompt", "prompts"), PROMPTS)
def test_one_prompt_or_several(prompt, prompts):
    assert completion(prompt=prompt).wanted.prompts == prompts


BAD_PROMPTS = [
    *(5, True, {}, {"a": 1}, None),
    *([1, "a"], ["a", 1], ["a", [1]], [[1], 1], [[1], "a"], [[1, "a"]], [["a"]], [[[1]]]),
    *([1.0], [True], [[True]], [None], ["a", None], [{}]),
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_what_is_no_prompt(prompt):
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field == "prompt"
    assert caught.value.message.startswith("prompt: ")


NO_FLOATS = ["1", True, [], {}, 10**400]
NO_INTS = ["1", True, 1.5, [], {}]
NO_BOOLS = ["true", 1, 0, []]
FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"]
INTS = ["n", "top_k", "seed", "min_tokens", "max_tokens", "max_completion_tokens", "priority"]
WRONG_TYPES = [
    *((name, value) for name in [*FLOATS, "repetition_penalty"] for value in NO_FLOATS),
    *((name, value) for name in [*INTS, "prompt_logprobs", "top_logprobs"] for value in NO_INTS),
    *((name, value) for name in ("ignore_eos", "stream", "echo") for value in NO_BOOLS),
    *(("return_token_ids", value) for value in NO_BOOLS),
    *((name, value) for name in ("model", "cache_salt") for value in (1, True, ["a"])),
    *(("stop", value) for value in (1, True, {}, [1], ["a", None], [["a"]])),
    *(("stop_token_ids", value) for value in (1, "1", {}, ["1"], [True], [1.0], [None])),
    *(("logit_bias", value) for value in (1, "a", [], [1], {"1": "2"}, {"1": True}, {"1": None})),
    *(("stream_options", value) for value in (1, [], {"include_usage": 1})),
]


@pytest.mark.parametrize("ask", [completion, chat])
@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_wrong_types_are_refused_by_name(ask, field, value):
    with pytest.raises(InvalidRequest) as caught:
        ask(**{field: value})
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize(
    "key",
    ["a", "", "-1", "+1", "1.0", "1_0", " 1", "01", "٣", "9" * 20, "9" * 5000, "null"],
)
def test_biases_of_what_is_no_token_id(key):
    with pytest.raises(InvalidRequest) as caught:
        completion(logit_bias={key: 1})
    assert caught.value.field == "logit_bias"
    assert len(caught.value.message) < 200


def test_biases_too_large_for_a_number_are_left_to_admission():
    raw = b'{"prompt": "hi", "logit_bias": {"5": 1' + b"0" * 400 + b', "6": 1e9, "1000000000": 0}}'
    bias = read_completion(raw, VALUES_MAX).wanted.logit_bias
    assert bias == {5: float("inf"), 6: 1e9, 1_000_000_000: 0.0}


BAD_LOGPROBS = [(completion, True), (completion, "1"), (chat, 1), (chat, "true")]


@pytest.mark.parametrize(("ask", "value"), BAD_LOGPROBS)
def test_logprobs_have_another_type_at_each_endpoint(ask, value):
    with pytest.raises(InvalidRequest) as caught:
        ask(logprobs=value)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize(
    ("ask", "field", "value"), [(completion, "top_logprobs", 2), (chat, "echo", True)]
)
def test_a_field_of_the_other_endpoint_is_not_ignored(ask, field, value):
    with pytest.raises(InvalidRequest) as caught:
        ask(**{field: value})
    assert caught.value.field == field
    neutral = 0 if field == "top_logprobs" else False
    assert ask(**{field: neutral}) == ask()


def test_fields_nobody_knows_are_ignored_and_later_ones_kept_to_be_refused():
    call = chat(user="me", metadata={"a": 1}, store=True, frobnicate=3, tools=[1])
    assert call.wanted.reserved == {"tools": [1]}


MANY = {
    "numbers": b"[" + b"1," * VALUES_MAX + b"1]",
    "lists": b"[" + b"[]," * (VALUES_MAX // 2) + b"1]",
    "objects": b"[" + b"{}," * (VALUES_MAX // 2) + b"1]",
    "nested": b"[" * VALUES_MAX + b"1",
    "names": b"{" + b'"":1,' * (VALUES_MAX // 2) + b'"":1}',
}


@pytest.mark.parametrize("ask", [read_completion, read_chat])
@pytest.mark.parametrize("kind", MANY)
def test_more_values_than_allowed_are_not_parsed(ask, kind, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(InvalidRequest) as caught:
        ask(b'{"prompt": ' + MANY[kind] + b"}", VALUES_MAX)
    assert caught.value.field == "body"
    assert caught.value.message.startswith("body: ")
    assert f"more than {VALUES_MAX}" in caught.value.message


def test_as_many_values_as_allowed_are_parsed():
    raw = b'{"prompt": [1, 2, 3], "seed": 1}'  # three commas, two colons, two brackets
    assert read_completion(raw, 7).wanted.prompts == (TokenPrompt((1, 2, 3)),)
    with pytest.raises(InvalidRequest, match=r"7 commas.* more than 6 "):
        read_completion(raw, 6)


def test_one_mistake_in_a_huge_list_is_enough():
    raw = b'{"prompt": "hi", "stop_token_ids": [' + b'"",' * 300_000 + b'""]}'
    with pytest.raises(InvalidRequest) as caught:
        read_completion(raw, VALUES_MAX)
    assert len(caught.value.message) < 200
