"""SP09: the log-probability minus infinity makes the JSON of a reply fail.

Here it is null in JSON and -inf in gRPC, in every list that can hold one; the first token of an
echoed prompt, which nothing predicts, is null too. More alternatives than the cap are refused.
"""

import math
from typing import Any

import grpc
import pytest

from tests.field.answers import Answer, Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.shared_specs import ENDLESS_CHAIN

pytestmark = pytest.mark.end_to_end

CLUSTER = ENDLESS_CHAIN
HTTP = ("http", "http-stream")
PROMPT = "an impossible Z before x"
CHAT = [{"role": "user", "content": PROMPT}]
TOKENS, TOPS, TOPS_MAX = 4, 3, 20


def joined_lists(answer: Answer) -> dict[str, list[Any]]:
    """The lists of a completion's `logprobs`, all chunks together; strict JSON was checked."""
    lists: dict[str, list[Any]] = {}
    for part in answer.raw:
        for choice in part["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                lists.setdefault(name, []).extend(values or [])
    return lists


def z_index(field: FieldCluster, answer: Answer) -> int:
    return answer.prompt_ids.index(field.tokenizer.id_of("Z"))


@pytest.mark.parametrize("protocol", HTTP)
def test_an_echo_with_an_impossible_token(field: FieldCluster, protocol: str) -> None:
    answer = field.ask(
        protocol, PROMPT, max_tokens=TOKENS, echo=True, logprobs=TOPS, temperature=1, top_k=1
    )
    assert answer.text == PROMPT + "yxyx"
    lists = joined_lists(answer)
    places = answer.prompt_tokens + TOKENS
    assert [len(lists[name]) for name in lists] == [places] * 4
    logprobs, tops = lists["token_logprobs"], lists["top_logprobs"]
    assert [index for index, value in enumerate(logprobs) if value is None] == [
        0,
        z_index(field, answer),
    ]
    assert tops[0] is None
    assert tops[z_index(field, answer)]["Z"] is None
    assert all(TOPS <= len(top) <= TOPS + 1 for top in tops[1:])
    # Each token's text stands at its offset; the start token is not in the text.
    assert lists["tokens"][0] == "<|start|>"
    for token, offset in zip(lists["tokens"][1:], lists["text_offset"][1:], strict=True):
        assert answer.text.startswith(token, offset)


@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["text", "chat"])
def test_prompt_logprobs_say_null_for_it(
    field: FieldCluster, prompt: str | list[dict[str, str]]
) -> None:
    answer = field.ask("http", prompt, max_tokens=TOKENS, prompt_logprobs=TOPS)
    (body,) = answer.raw
    entries = body.get("prompt_logprobs") or body["choices"][0]["prompt_logprobs"]
    assert len(entries) == answer.prompt_tokens
    assert entries[0] is None
    for token_id, entry in zip(answer.prompt_ids[1:], entries[1:], strict=True):
        assert TOPS <= len(entry) <= TOPS + 1
        impossible = token_id == field.tokenizer.id_of("Z")
        assert (entry[str(token_id)]["logprob"] is None) == impossible


@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["text", "chat"])
def test_grpc_says_minus_infinity(field: FieldCluster, prompt: str | list[dict[str, str]]) -> None:
    answer = field.ask(
        "grpc", prompt, max_tokens=TOKENS, prompt_logprobs=TOPS, top_logprobs=TOPS, top_k=1
    )
    scores = [message.prompt_logprobs for message in answer.raw]
    logprobs = [math.nan, *(value for part in scores for value in part.logprobs)]
    assert len(logprobs) == answer.prompt_tokens
    infinite = [index for index, value in enumerate(logprobs) if math.isinf(value)]
    assert infinite == [z_index(field, answer)]
    tops = [top for part in scores for top in part.top_tokens]
    tops += [top for message in answer.raw for top in message.top_tokens]
    assert len(tops) == answer.prompt_tokens - 1 + TOKENS
    assert all(len(top.ids) == len(top.logprobs) == TOPS for top in tops)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt", ["x", [{"role": "user", "content": "x"}]], ids=["text", "chat"])
def test_a_token_masked_by_bias_keeps_its_own_score(
    field: FieldCluster, protocol: str, prompt: str | list[dict[str, str]]
) -> None:
    """Scores are the model's: the masked token is still the likeliest, and the drawn one is not."""
    impossible = field.tokenizer.id_of("Z")
    tops = {"logprobs": True, "top_logprobs": TOPS}
    if protocol != "grpc" and isinstance(prompt, str):
        tops = {"logprobs": TOPS}
    plain = field.ask(protocol, prompt, max_tokens=1)
    bias = {plain.ids[0]: -100, impossible: 100}
    answer = field.ask(protocol, prompt, max_tokens=TOKENS, logit_bias=bias, **tops)
    assert not {plain.ids[0], impossible} & set(answer.ids)
    assert len(answer.logprobs) == TOKENS
    assert answer.logprobs[0] < -10
    found = listed_tops(answer)
    assert len(found) == TOKENS
    assert all(len(place) in (TOPS, TOPS + 1) for place in found)
    assert max(found[0]) == pytest.approx(plain.logprobs[0], abs=1e-4)


def listed_tops(answer: Answer) -> list[list[float]]:
    """Log-probabilities of the likeliest tokens at each place."""
    if not isinstance(answer.raw[0], dict):
        return [list(top.logprobs) for message in answer.raw for top in message.top_tokens]
    scores = [choice.get("logprobs") or {} for part in answer.raw for choice in part["choices"]]
    return [
        *(list(place.values()) for each in scores for place in each.get("top_logprobs") or []),
        *(
            [top["logprob"] for top in token["top_logprobs"]]
            for each in scores
            for token in each.get("content") or []
        ),
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt", ["x", [{"role": "user", "content": "x"}]], ids=["text", "chat"])
def test_zero_lists_the_drawn_token_only(
    field: FieldCluster, protocol: str, prompt: str | list[dict[str, str]]
) -> None:
    parameters: dict[str, object] = {"logprobs": True, "top_logprobs": 0}
    if protocol != "grpc" and isinstance(prompt, str):
        parameters = {"logprobs": 0}
    answer = field.ask(protocol, prompt, max_tokens=TOKENS, **parameters)
    assert len(answer.logprobs) == len(answer.ids) == TOKENS
    assert not any(listed_tops(answer))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_above_the_cap_is_refused(field: FieldCluster, protocol: str) -> None:
    chat = [{"role": "user", "content": "x"}]
    cases: list[tuple[str, object, dict[str, object]]] = [
        ("top_logprobs", chat, {"logprobs": True, "top_logprobs": TOPS_MAX + 1})
    ]
    if protocol != "grpc":
        cases.append(("logprobs", "x", {"logprobs": TOPS_MAX + 1}))
        cases.append(("logprobs", "x", {"logprobs": -1}))
    if protocol != "http-stream":
        cases.append(("prompt_logprobs", "x", {"prompt_logprobs": TOPS_MAX + 1}))
    for name, prompt, parameters in cases:
        with pytest.raises(Refused) as caught:
            field.ask(protocol, prompt, max_tokens=TOKENS, **parameters)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.parameter == name
        assert str(TOPS_MAX) in caught.value.message
    allowed = field.ask(protocol, chat, max_tokens=TOKENS, top_logprobs=TOPS_MAX)
    assert all(len(place) == TOPS_MAX for place in listed_tops(allowed))
