"""The end of one choice, in token order, and what a reader gets of it."""

from random import Random

import pytest

from control_plane.intake.admitted import AdmittedChoice, Ends
from control_plane.intake.answer import Answer
from control_plane.intake.stop_matcher import StopStrings
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason, Request, Sampling
from tests.control_plane.intake.fake_core import END, FACTS, delta, likeliest, scores

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model.tokenizer, "tiny")


@pytest.fixture
def make(tokenizer):
    def make(
        *, stop_ids=(END,), stop=(), min_tokens=0, tokens_max=100, prompt_ids=(1, 2, 3), **fields
    ):
        request = Request("r", tuple(prompt_ids), Sampling(0.0, 9), **fields)
        ends = Ends(frozenset(stop_ids), StopStrings(stop), min_tokens, tokens_max)
        return Answer(AdmittedChoice(4, 2, request, ends), tokenizer)

    return make


def tell(answer, text, *more, first_index=None):
    """Some bytes as one delta; returns how many tokens the answer took."""
    raw = text.encode() if isinstance(text, str) else text
    first = answer.count if first_index is None else first_index
    return answer.take(delta(answer.choice.request, first, [*raw, *more]).deltas[0])


def tell_scores(answer, *where):
    answer.take_prompt(scores(answer.choice.request, *where).prompt_deltas[0])


def test_a_stop_token_ends_the_answer_and_is_counted_but_not_shown(make):
    answer = make(stop_ids=(END, ord("X")))
    assert tell(answer, "abX", *b"cd", END) == 3
    assert answer.complete
    assert tell(answer, "more", first_index=6) == 0
    piece = answer.take_piece()
    assert (piece.choice, piece.first_index, piece.text, piece.token_ids) == (
        4,
        0,
        "ab",
        (*b"abX",),
    )
    assert (piece.finish_reason, answer.count, answer.computed_count) == (STOP, 3, 3)
    assert not answer.has_piece


def test_an_end_token_without_stop_ids_is_silent_and_the_answer_goes_on(make):
    answer = make(stop_ids=(), tokens_max=4)
    tell(answer, "a", END, *b"bcd")
    piece = answer.take_piece()
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("abc", (97, END, 98, 99), LENGTH)


@pytest.mark.parametrize("stop", [(), ("a",), ("b",)])
def test_a_stop_token_or_string_at_the_last_place_is_a_stop(make, stop):
    answer = make(tokens_max=2, stop=stop)
    tell(answer, "ab" if stop else "a", *(() if stop else (END,)))
    assert answer.finish_reason is STOP


def test_a_stop_string_cuts_text_tokens_logprobs_and_alternatives(make):
    answer = make(stop=("END",), wants_logprobs=True, top_tokens=2)
    assert tell(answer, "say END now") == 7
    piece = answer.take_piece()
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("say ", (*b"say END",), STOP)
    assert piece.logprobs == tuple(-float(i) for i in range(7))
    assert piece.tops == tuple(likeliest(each, 2) for each in b"say END")


def test_text_that_may_become_a_stop_string_lags_behind_its_tokens(make):
    answer = make(stop=("abc",), tokens_max=6)
    tell(answer, "xab")
    first = answer.take_piece()
    assert (first.text, first.token_ids) == ("x", (*b"xab",))
    tell(answer, "d")
    assert answer.take_piece().text == "abd"
    tell(answer, "ab")
    last = answer.take_piece()
    assert (last.text, last.finish_reason) == ("ab", LENGTH)


def test_held_text_is_released_by_a_stop_token(make):
    answer = make(stop=("abc",))
    tell(answer, "ab", END)
    assert answer.take_piece().text == "ab"


def test_below_min_tokens_neither_ids_nor_strings_end_the_answer(make):
    answer = make(stop=("ab",), min_tokens=5)
    assert tell(answer, "ab", END, *b"ab") == 5
    piece = answer.take_piece()
    assert (piece.text, piece.finish_reason) == ("ab", STOP)
    answer = make(stop_ids=(ord("X"),), min_tokens=2)
    assert tell(answer, "XaX") == 3
    assert answer.take_piece().text == "Xa"


def test_the_core_may_lower_the_limit_but_not_raise_it(make):
    for limit, count in ((3, 3), (1000, 5)):
        answer = make(tokens_max=5)
        answer.accept(limit)
        tell(answer, "abcdefgh")
        assert (answer.count, answer.finish_reason) == (count, LENGTH)


def test_half_a_character_waits_and_a_cut_one_is_replaced_once(make):
    raw = "👍".encode()
    answer = make(tokens_max=3)
    tell(answer, raw[:2])
    held = answer.take_piece()
    tell(answer, raw[2:3])
    assert (held.text, held.token_ids) == ("", tuple(raw[:2]))
    assert answer.take_piece().text == "\ufffd"


def test_a_slow_reader_gets_one_piece_and_a_quick_one_many(make):
    answer = make(wants_logprobs=True)
    for byte in "né👍".encode():
        tell(answer, bytes([byte]))
    slow = answer.take_piece()
    tell(answer, "q")
    quick = answer.take_piece()
    assert (slow.first_index, slow.text, len(slow.logprobs)) == (0, "né👍", 7)
    assert (quick.first_index, quick.text, quick.finish_reason) == (7, "q", None)


def test_a_repeated_token_from_the_core_is_a_broken_promise(make):
    answer = make()
    tell(answer, "ab")
    with pytest.raises(AssertionError):
        tell(answer, "b", first_index=1)


# -------------------------------------------------------------------- resumed answers


@pytest.mark.parametrize(
    ("held", "settings", "reason"),
    [
        ([97, END], {}, STOP),
        ([97, 98], {"tokens_max": 2}, LENGTH),
        ([*b"xab"], {"stop": ("ab",)}, STOP),
    ],
)
def test_a_complete_answer_resumed_needs_no_core(make, held, settings, reason):
    answer = make(output_ids=tuple(held), **settings)
    assert answer.submission is None
    piece = answer.take_piece()
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("", (), reason)
    assert answer.count == len(held)


def test_an_answer_resumed_at_the_core_s_limit_ends_at_once(make):
    answer = make(output_ids=tuple(b"abc"))
    assert answer.submission is answer.choice.request
    answer.accept(3)
    assert (answer.finish_reason, answer.computed_count) == (LENGTH, 3)


def test_what_was_held_back_at_the_core_s_limit_comes_without_tokens(make):
    answer = make(output_ids=tuple(b"xab"), stop=("abc",))
    answer.accept(3)
    piece = answer.take_piece()
    assert (piece.text, piece.texts, piece.token_ids) == ("ab", (), ())
    assert piece.finish_reason is LENGTH


def test_the_text_of_each_token_is_what_it_makes_certain(make):
    answer = make(stop=("abc",), tokens_max=6)
    tell(answer, "xabdab")
    assert answer.take_piece().texts == ("x", "", "", "abd", "", "ab")


@pytest.mark.parametrize("seed", range(30))
def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(make, seed):
    random = Random(seed)
    stops = tuple("".join(random.choices("ab👍", k=random.randint(1, 4))) for _ in range(2))
    raw = "".join(random.choices("ab👍", k=30)).encode()
    settings = {"stop": stops, "min_tokens": random.randint(0, 8), "tokens_max": 25}
    whole = make(**settings)
    tell(whole, raw)
    expected = whole.take_piece()
    assert len(expected.texts) == len(expected.token_ids)
    assert "".join(expected.texts) == expected.text

    cut = random.randint(0, whole.count - 1)
    before = make(**settings)
    tell(before, raw[:cut])
    after = make(output_ids=tuple(raw[:cut]), **settings)
    tell(after, raw[cut:])
    rest = after.take_piece()
    assert before.take_piece().text + rest.text == expected.text
    # A piece that was cut between two messages can be resumed there, too.
    assert "".join(expected.texts[:cut]) + rest.text == expected.text
    assert (rest.first_index, rest.token_ids) == (cut, expected.token_ids[cut:])
    assert rest.finish_reason is expected.finish_reason


# -------------------------------------------------------------------- scores of the prompt


def test_scores_come_before_tokens_and_are_joined_like_them(make):
    answer = make(prompt_top_tokens=1, tokens_max=1)
    tell_scores(answer, 1, 1)
    first = answer.take_piece()
    tell_scores(answer, 2)
    tell(answer, "a")
    second = answer.take_piece()
    assert [each.first_index for each in (*first.prompt_deltas, *second.prompt_deltas)] == [1, 2]
    assert first.finish_reason is None
    assert (first.token_ids, second.text, second.finish_reason) == ((), "a", LENGTH)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_max": 0, "max_tokens": 0},
        {"tokens_max": 2, "output_ids": (97, 98)},
        {"output_ids": (97, END)},
    ],
)
def test_where_nothing_is_to_be_drawn_only_the_scores_are_waited_for(make, settings):
    answer = make(prompt_top_tokens=0, **settings)
    submission = answer.submission
    assert (submission.output_ids, submission.max_tokens) == ((), 1)
    answer.accept(1)
    assert not answer.has_piece
    tell_scores(answer)
    assert answer.complete
    assert tell(answer, "z", first_index=0) == 0
    assert answer.facts == FACTS
    piece = answer.take_piece()
    assert (piece.token_ids, piece.text, len(piece.prompt_deltas)) == ((), "", 1)
    assert piece.finish_reason is not None
    assert (answer.count, answer.computed_count) == (len(settings.get("output_ids", ())), 0)


def test_no_output_and_nothing_to_score_is_over_at_once(make):
    for fields in ({}, {"prompt_top_tokens": 0, "prompt_ids": (1,)}):
        answer = make(tokens_max=0, **fields)
        assert answer.submission is None
        assert answer.take_piece().finish_reason is LENGTH
