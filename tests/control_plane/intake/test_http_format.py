"""Pieces of answers in OpenAI's shapes."""

import json
import math

import pytest

from control_plane.intake.admitted import Admitted, AdmittedChoice, Ends
from control_plane.intake.answer_piece import AnswerPiece, Usage
from control_plane.intake.http_format import ChatFormat, CompletionFormat
from control_plane.intake.http_schema import AnswerShape
from control_plane.intake.stop_matcher import StopStrings
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason, Request, Sampling
from control_plane.scheduling.messages import PromptDelta, PromptScores, TopTokens
from tests.control_plane.intake.fake_core import END, START

USAGE = Usage(3, 4, 0, "g0", 0, 0, 5)
ENDS = Ends(frozenset(), StopStrings(()), 0, 100)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model.tokenizer, "tiny")


def admitted(*prompts, n=1, echo=False, prompt_top_tokens=None):
    """prompts: token ids, which are bytes; the text of an echo is what they say."""
    choices = []
    for prompt_index, prompt in enumerate(prompts):
        for choice in range(n):
            request = Request(
                f"x/{len(choices)}",
                tuple(prompt),
                Sampling(0.0, 5, choice=choice),
                prompt_top_tokens=prompt_top_tokens,
            )
            text = bytes(i for i in prompt if i < 256).decode() if echo else None
            choices.append(AdmittedChoice(len(choices), prompt_index, request, ENDS, text))
    return Admitted("x", 5, tuple(choices))


def scores(first_index, logprobs, tops=()):
    return PromptDelta("x", first_index, PromptScores(tuple(logprobs), tuple(tops)))


def piece(choice, text="", *, first=0, ids=None, end=None, last=False, **kwargs):
    return AnswerPiece(
        choice=choice,
        first_index=first,
        token_ids=tuple(text.encode()) if ids is None else tuple(ids),
        text=text,
        finish_reason=end,
        usage=USAGE if last else None,
        **kwargs,
    )


def strict(raw):
    return json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def whole(layout, pieces):
    return strict(layout.whole(pieces))


def events(layout, pieces):
    raw = b"".join(
        layout.chunk(each) + (layout.last_chunks(each.usage) if each.usage else b"")
        for each in pieces
    )
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [strict(block.removeprefix("data: ")) for block in blocks]


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
MIXED = [
    piece(1, "b"),
    piece(0, "a"),
    piece(2, "", ids=[END], end=STOP),
    piece(1, "B", first=1, end=LENGTH),
    piece(0, "A", first=1, end=STOP, last=True),
]


def completion(tokenizer, who, **shape):
    return CompletionFormat(who, AnswerShape(**shape), "tiny", 9, tokenizer)


def chat(tokenizer, who, **shape):
    return ChatFormat(who, AnswerShape(**shape), "tiny", 9, tokenizer)


def test_choices_of_a_completion_by_index(tokenizer):
    answer = whole(completion(tokenizer, admitted(b"p", n=3)), MIXED)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert [c["text"] for c in answer["choices"]] == ["aA", "bB", ""]
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop", "length", "stop"]
    assert answer["usage"]["total_tokens"] == 7
    assert (answer["id"], answer["object"], answer["model"], answer["created"]) == (
        "x",
        "text_completion",
        "tiny",
        9,
    )


@pytest.mark.parametrize("include_usage", [False, True])
def test_choices_of_a_streamed_conversation(tokenizer, include_usage):
    layout = chat(tokenizer, admitted(b"p", n=3), streamed=True, include_usage=include_usage)
    chunks = events(layout, MIXED)
    if include_usage:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
    else:
        assert not any("usage" in chunk for chunk in chunks)
    by_index = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    for choices in by_index.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in c["delta"] for c in choices[1:])
        reasons = [c["finish_reason"] for c in choices]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] is not None
    texts = {i: "".join(c["delta"].get("content", "") for c in cs) for i, cs in by_index.items()}
    assert texts == {0: "aA", 1: "bB", 2: ""}


def test_prompt_ids_are_said_once_in_a_stream(tokenizer):
    shape = {"streamed": True, "return_token_ids": True}
    chunks = events(chat(tokenizer, admitted(b"p", n=3), **shape), MIXED)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[112]] + [None] * 7
    chunks = events(completion(tokenizer, admitted(b"p", b"q", b"r"), **shape), MIXED)
    said = [(c["index"], c.get("prompt_token_ids")) for chunk in chunks for c in chunk["choices"]]
    assert said == [(1, [113]), (0, [112]), (2, [114]), (1, None), (0, None)]


TOPS = (
    TopTokens((104, 0xE2, 72), (-0.5, -1.0, -math.inf)),
    TopTokens((0xE2, 0x82, 105), (-0.25, -2.0, -3.0)),
)
SCORED = piece(0, "hx", ids=[104, 120], logprobs=(-0.5, -math.inf), tops=TOPS, end=STOP, last=True)


def test_alternatives_of_a_completion(tokenizer):
    layout = completion(tokenizer, admitted(b"p"), logprobs=True, top_logprobs=3)
    logprobs = whole(layout, [SCORED])["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["h", "x"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [
            {"h": -0.5, "bytes:\\xe2": -1.0, "H": None},
            {"bytes:\\xe2": -0.25, "bytes:\\x82": -2.0, "i": -3.0, "x": None},
        ],
        "text_offset": [0, 1],
    }


def test_a_completion_with_the_chosen_token_only(tokenizer):
    layout = completion(tokenizer, admitted(b"p"), logprobs=True)
    logprobs = whole(layout, [SCORED])["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5, None]
    assert logprobs["top_logprobs"] is None


def test_alternatives_of_a_conversation(tokenizer):
    layout = chat(tokenizer, admitted(b"p"), logprobs=True, top_logprobs=2)
    first, second = whole(layout, [SCORED])["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xE2]},
        ],
    }
    assert second["logprob"] is None
    assert len(second["top_logprobs"]) == 2


PROMPT = [START, *b"ab"]
PROMPT_SCORES = [
    scores(1, [-1.0], [TopTokens((97, 98), (-1.0, -1.5))]),
    scores(2, [-math.inf], [TopTokens((99, 97), (-0.1, -0.2))]),
]


def test_prompt_logprobs_of_both_endpoints(tokenizer):
    who = admitted(PROMPT, prompt_top_tokens=2)
    pieces = [
        piece(0, prompt_deltas=(PROMPT_SCORES[0],)),
        piece(0, prompt_deltas=(PROMPT_SCORES[1],)),
        piece(0, "c", end=STOP, last=True),
    ]
    expected = [
        None,
        {
            "97": {"logprob": -1.0, "decoded_token": "a", "rank": 1},
            "98": {"logprob": -1.5, "decoded_token": "b", "rank": 2},
        },
        {
            "98": {"logprob": None, "decoded_token": "b"},
            "99": {"logprob": -0.1, "decoded_token": "c", "rank": 1},
            "97": {"logprob": -0.2, "decoded_token": "a", "rank": 2},
        },
    ]
    answer = whole(completion(tokenizer, who, prompt_logprobs=2), pieces)
    assert answer["choices"][0]["prompt_logprobs"] == expected
    answer = whole(chat(tokenizer, who, prompt_logprobs=2), pieces)
    assert answer["prompt_logprobs"] == expected
    alone = whole(completion(tokenizer, who, prompt_logprobs=0), pieces)
    assert [each and list(each) for each in alone["choices"][0]["prompt_logprobs"]] == [
        None,
        ["97"],
        ["98"],
    ]


def test_echo_puts_the_prompt_first(tokenizer):
    who = admitted(b"p", b"q", echo=True)
    pieces = [piece(1, "b", end=STOP), piece(0, "a"), piece(0, "A", end=STOP, last=True)]
    answer = whole(completion(tokenizer, who, echo=True), pieces)
    assert [c["text"] for c in answer["choices"]] == ["paA", "qb"]
    assert [c["logprobs"] for c in answer["choices"]] == [None, None]
    chunks = events(completion(tokenizer, who, echo=True, streamed=True), pieces)
    assert [(c["index"], c["text"]) for chunk in chunks for c in chunk["choices"]] == [
        (1, "qb"),
        (0, "pa"),
        (0, "A"),
    ]


def test_echo_with_logprobs_scores_the_prompt_first(tokenizer):
    who = admitted(PROMPT, echo=True, prompt_top_tokens=2)
    pieces = [
        piece(0, prompt_deltas=(PROMPT_SCORES[0],)),
        piece(0, prompt_deltas=(PROMPT_SCORES[1],)),
        piece(0, "h", ids=[104], logprobs=(-0.5,), tops=TOPS[:1]),
        piece(0, "", first=1, ids=[END], logprobs=(-2.0,), tops=TOPS[:1], end=STOP, last=True),
    ]
    shape = {"echo": True, "logprobs": True, "top_logprobs": 1}
    choice = whole(completion(tokenizer, who, **shape), pieces)["choices"][0]
    assert choice["text"] == "abh"
    assert choice["logprobs"] == {
        "tokens": ["<|im_start|>", "a", "b", "h", "<|im_end|>"],
        "token_logprobs": [None, -1.0, None, -0.5, -2.0],
        "top_logprobs": [
            None,
            {"a": -1.0},
            {"c": -0.1, "b": None},
            {"h": -0.5},
            {"h": -0.5, "<|im_end|>": -2.0},
        ],
        "text_offset": [0, 0, 1, 2, 3],
    }
    chunks = events(completion(tokenizer, who, **shape, streamed=True), pieces)
    first, second, third = (chunk["choices"][0] for chunk in chunks)
    assert [c["text"] for c in (first, second, third)] == ["ab", "h", ""]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [each for c in (first, second, third) for each in c["logprobs"][name]]
        assert joined == choice["logprobs"][name]


@pytest.mark.parametrize("prompt_top_tokens", [None, 0])
def test_echo_of_the_prompt_alone(tokenizer, prompt_top_tokens):
    scored = prompt_top_tokens is not None
    who = admitted(PROMPT, echo=True, prompt_top_tokens=prompt_top_tokens)
    deltas = (scores(1, [-1.0, -2.0]),) if scored else ()
    pieces = [piece(0, prompt_deltas=deltas, end=LENGTH, last=True)]
    for answer in (
        whole(completion(tokenizer, who, echo=True, logprobs=scored), pieces),
        events(completion(tokenizer, who, echo=True, logprobs=scored, streamed=True), pieces)[0],
    ):
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        if scored:
            assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
            assert choice["logprobs"]["top_logprobs"] is None


def test_a_prompt_of_one_token_has_no_scores(tokenizer):
    who = admitted(b"p", echo=True, prompt_top_tokens=1)
    pieces = [piece(0, "h", ids=[104], logprobs=(-0.5,), tops=TOPS[:1], end=STOP, last=True)]
    layout = completion(tokenizer, who, echo=True, logprobs=True, top_logprobs=1)
    (choice,) = whole(layout, pieces)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"h": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1]


def test_offsets_where_the_client_wrote_the_name_of_a_special_token(tokenizer):
    request = Request("x", (*b"a", START, *b"b"), Sampling(0.0, 5), prompt_top_tokens=0)
    who = Admitted("x", 5, (AdmittedChoice(0, 0, request, ENDS, "a<|im_start|>b"),))
    pieces = [
        piece(
            0,
            "c",
            prompt_deltas=(scores(1, [-1.0, -2.0]),),
            logprobs=(-3.0,),
            end=STOP,
            last=True,
        )
    ]
    (choice,) = whole(completion(tokenizer, who, echo=True, logprobs=True), pieces)["choices"]
    for token, offset in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
    ):
        assert choice["text"][offset:].startswith(token)


def test_offsets_count_characters(tokenizer):
    layout = completion(tokenizer, admitted(b"p"), logprobs=True)
    answer = piece(0, "é1", logprobs=(-1.0, -1.0, -1.0), end=STOP, last=True)
    logprobs = whole(layout, [answer])["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "1"]
    assert logprobs["text_offset"] == [0, 0, 1]
