"""Pieces of answers in OpenAI's shapes."""

import json
import math

import pytest

from control_plane.intake.admitted import Admitted, AdmittedChoice, Ends
from control_plane.intake.answer_piece import AnswerPiece, Usage
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.generation_input import GenerationInput
from control_plane.intake.http_chat import ChatFormat
from control_plane.intake.http_completion import CompletionFormat
from control_plane.intake.http_logprobs import TextOffsets
from control_plane.intake.http_schema import HttpCall
from control_plane.intake.model_files import TokenizerJson
from control_plane.intake.stop_matcher import StopStrings
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason, Request, Sampling
from control_plane.scheduling.messages import PromptDelta, PromptScores, TopTokens
from tests.control_plane.intake.fake_core import END, START
from tests.fakes.field_tokenizers import FieldTokenizer

USAGE = Usage(3, 4, 0, "g0", 0, 0, 5)
ENDS = Ends(frozenset(), StopStrings(()), 0, 100)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model.tokenizer, "tiny")


def admitted(*prompts, n=1, echo=False, prompt_top_tokens=None):
    """prompts: token ids, which are bytes; the text of an echo is what they say. The first choice
    of each is the one that scores it."""
    choices = []
    for prompt_index, prompt in enumerate(prompts):
        for choice in range(n):
            request = Request(
                f"x/{len(choices)}",
                tuple(prompt),
                Sampling(0.0, 5, choice=choice),
                prompt_top_tokens=None if choice else prompt_top_tokens,
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
    for each in pieces:
        layout.gather(each)
    return strict(b"".join(layout.whole()))


def events(layout, pieces):
    raw = b"".join(
        layout.chunk(ready) + (layout.last_chunks(ready.usage) if ready.usage else b"")
        for each in pieces
        for ready in layout.ready(each)
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


def call(*, logprobs=False, top_logprobs=None, prompt_logprobs=None, echo=False, **shape):
    wanted = GenerationInput(
        (),
        logprobs=logprobs,
        top_tokens=top_logprobs,
        prompt_top_tokens=prompt_logprobs,
        echo=echo,
    )
    return HttpCall(wanted, **shape)


def completion(tokenizer, who, **shape):
    return CompletionFormat(who, call(**shape), "tiny", 9, tokenizer)


def chat(tokenizer, who, **shape):
    return ChatFormat(who, call(**shape), "tiny", 9, tokenizer)


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


SHARED = [
    piece(1, "x", logprobs=(-3.0,)),
    piece(0, prompt_deltas=(PROMPT_SCORES[0],)),
    piece(3, "q", logprobs=(-3.0,)),
    piece(1, "y", first=1, logprobs=(-4.0,), end=LENGTH),
    piece(2, "z", logprobs=(-5.0,), prompt_deltas=tuple(PROMPT_SCORES), end=STOP),
    piece(0, prompt_deltas=(PROMPT_SCORES[1],)),
    piece(0, "c", logprobs=(-6.0,), end=STOP),
    piece(3, "r", first=1, logprobs=(-4.0,), end=STOP, last=True),
]
"""Two prompts, two choices each. Only the first choice of a prompt has its scores, and some of the
others are ahead of it."""


def test_the_choices_of_a_prompt_share_its_scores(tokenizer):
    who = admitted(PROMPT, PROMPT, n=2, echo=True, prompt_top_tokens=2)
    shape = {"echo": True, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    choices = whole(completion(tokenizer, who, **shape, prompt_logprobs=1), SHARED)["choices"]
    assert [c["text"] for c in choices] == ["abc", "abxy", "abz", "abqr"]
    for choice in choices:
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -1.0, None]
        assert choice["logprobs"]["tokens"][:3] == ["<|im_start|>", "a", "b"]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"a": -1.0, "b": -1.5}]
    # What is said of the prompt itself is said once.
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [name in choice for choice in choices] == [True, False, True, False]
    assert choices[0]["prompt_logprobs"] == choices[2]["prompt_logprobs"]


def test_a_streamed_choice_waits_until_its_prompt_is_scored(tokenizer):
    who = admitted(PROMPT, PROMPT, n=2, echo=True, prompt_top_tokens=2)
    shape = {"echo": True, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    chunks = [
        chunk["choices"][0]
        for chunk in events(completion(tokenizer, who, **shape, streamed=True), SHARED)
    ]
    # What had to wait comes as one chunk of each choice, and those of the other prompt go on.
    assert [(c["index"], c["text"]) for c in chunks] == [
        (3, "abq"),
        (2, "abz"),
        (1, "abxy"),
        (0, "ab"),
        (0, "c"),
        (3, "r"),
    ]
    assert [c["finish_reason"] for c in chunks] == [None, "stop", "length", None, "stop", "stop"]
    said = [c.get("prompt_token_ids") for c in chunks]
    assert said == [None, PROMPT, None, PROMPT, None, None]
    choices = whole(completion(tokenizer, who, **shape), SHARED)["choices"]
    for choice in choices:
        parts = [c for c in chunks if c["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][name]] == values


def test_without_scores_no_choice_waits(tokenizer):
    who = admitted(b"p", n=2, echo=True)
    pieces = [piece(1, "x"), piece(1, "y", first=1, end=STOP), piece(0, "", end=STOP, last=True)]
    chunks = events(completion(tokenizer, who, echo=True, streamed=True), pieces)
    said = [(c["index"], c["text"]) for chunk in chunks for c in chunk["choices"]]
    assert said == [(1, "px"), (1, "y"), (0, "p")]


def test_a_whole_answer_comes_choice_by_choice(tokenizer):
    layout = completion(tokenizer, admitted(b"p", n=3), return_token_ids=True)
    for each in MIXED:
        layout.gather(each)
    head, *choices, tail = layout.whole()
    assert head.endswith(b'"choices":[')
    assert [strict(choice.lstrip(b","))["index"] for choice in choices] == [0, 1, 2]
    assert "usage" in strict(b"{" + tail.removeprefix(b"],"))


MANY = 10_000
SIZES = [
    ({}, 0),
    ({"return_token_ids": True}, MANY),
    ({"logprobs": True}, MANY),
    ({"logprobs": True, "top_logprobs": 4, "return_token_ids": True}, 6 * MANY),
]


@pytest.mark.parametrize(("shape", "entries"), SIZES)
def test_all_that_takes_time_to_write_counts(tokenizer, shape, entries):
    short = admitted(b"p", n=2)
    answer = piece(1, "", ids=[65] * MANY, end=STOP)
    layout = completion(tokenizer, short, **shape)
    assert entries <= layout.chunk_size(answer) < entries + 10
    layout.gather(answer)
    layout.gather(piece(0, "x" * 100_000, ids=[], end=STOP, last=True))
    assert layout.whole_size > entries + 1000
    # Its prompt, where the choice begins with it.
    long = admitted([65] * MANY, n=2, echo=True, prompt_top_tokens=4)
    layout = completion(tokenizer, long, **shape)
    assert layout.chunk_size(piece(1, "")) > 100 + ((entries - MANY) if "logprobs" in shape else 0)
    ids_count = MANY if "return_token_ids" in shape else 0
    first, other = layout.chunk_size(piece(0, "")), layout.chunk_size(piece(1, ""))
    assert first - other == ids_count


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


def test_offsets_where_a_prompt_ends_within_a_character(tokenizer):
    """The character is complete with the first token of the answer, and part of its text."""
    offsets = TextOffsets(tokenizer, "é".encode()[:1], "")
    assert offsets.of(["é".encode()[1], *b"ab"]) == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["", "The fox"])
def test_offsets_of_a_tokenizer_that_puts_a_space_first(prompt, tmp_path):
    """They are places in the text that the same tokens give as an answer."""
    path = tmp_path / "tokenizer.json"
    FieldTokenizer(True).library.save(str(path))
    tokenizer = Tokenizer(TokenizerJson(path), "test")
    prompt_ids = (tokenizer.special_id("<|start|>"), *tokenizer.encode(prompt, add_special=False))
    output_ids = tokenizer.encode("then it runs", add_special=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    texts = [detokenizer.feed(token_id) for token_id in output_ids]
    assert texts[0].startswith(" ") == bool(prompt)
    expected = [len("".join(texts[:i])) for i in range(len(texts))]
    assert TextOffsets(tokenizer, prompt_ids, "").of(output_ids) == expected
