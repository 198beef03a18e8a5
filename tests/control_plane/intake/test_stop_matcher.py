"""Stop strings against the plain definition: however the text is cut, the answer is the same."""

import time
from random import Random

import pytest

from control_plane.intake.stop_matcher import StopMatcher, StopStrings


def by_definition(tokens: list[str], stops: list[str], min_tokens: int) -> tuple[str, int | None]:
    """The answer, and the number of the token that ended it, if one did."""
    text = ""
    for number, token in enumerate(tokens, 1):
        for character in token:
            text += character
            found = [stop for stop in stops if text.endswith(stop)]
            if found and number >= min_tokens:
                return text[: -max(map(len, found))], number
    return text, None


def held_by_definition(text: str, stops: list[str]) -> int:
    lengths = range(1, max(map(len, stops), default=1))
    return max(
        (n for n in lengths if any(len(s) > n and text.endswith(s[:n]) for s in stops)), default=0
    )


def cut(text: str, random: Random) -> list[str]:
    tokens = []
    while text:
        count = random.choice((0, 1, 1, 2, 3, 7))
        tokens.append(text[:count])
        text = text[count:]
    return tokens


def matched(tokens: list[str], stops: list[str], min_tokens: int = 0) -> tuple[str, int | None]:
    matcher, answer, text = StopMatcher(StopStrings(stops)), "", ""
    for number, token in enumerate(tokens, 1):
        answer += matcher.feed(token, may_stop=number >= min_tokens)
        if matcher.stopped:
            return answer, number
        text += token
        assert len(text) - len(answer) == held_by_definition(text, stops), (text, stops)
    return answer + matcher.flush(), None


@pytest.mark.parametrize("seed", range(40))
def test_the_definition_over_random_texts_and_cuts(seed):
    random = Random(seed)
    for _ in range(40):
        alphabet = random.choice(("ab", "abc", "aé👍\n", "abcdefgh"))
        stops = [
            "".join(random.choices(alphabet, k=random.randint(1, 5)))
            for _ in range(random.randint(0, 5))
        ]
        text = "".join(random.choices(alphabet, k=random.randint(0, 40)))
        whole, ended_by = by_definition(list(text), stops, 0)
        for _ in range(3):
            tokens = cut(text, random)
            answer, number = matched(tokens, stops)
            assert (answer, number is None) == (whole, ended_by is None)
            min_tokens = random.randint(0, len(tokens) + 1)
            expected = by_definition(tokens, stops, min_tokens)
            assert matched(tokens, stops, min_tokens) == expected, (tokens, stops, min_tokens)


@pytest.mark.parametrize(
    ("text", "stops", "answer"),
    [
        ("one two", ["two"], "one "),
        ("abcd", ["cd", "bcd"], "a"),
        ("abcd", ["bcde", "abcd", "bc"], "a"),
        ("aaab", ["aab"], "a"),
        ("no end", ["endless"], "no end"),
        ("stop", ["stop"], ""),
    ],
)
def test_the_earliest_completed_match_wins_and_of_several_the_longest(text, stops, answer):
    assert matched([text], stops)[0] == answer
    assert matched(list(text), stops)[0] == answer


def test_what_may_become_a_stop_string_is_held_and_released_when_it_cannot():
    matcher = StopMatcher(StopStrings(["\n\nUser:"]))
    assert matcher.feed("Hi.\n") == "Hi."
    assert matcher.feed("\n") == ""
    assert matcher.feed("Use") == ""
    assert matcher.feed("ful") == "\n\nUseful"
    assert matcher.feed("\n") == ""
    assert matcher.flush() == "\n"
    assert not matcher.stopped


def test_the_cost_is_that_of_the_text_for_the_worst_strings_too():
    """A naive search takes minutes here: every place of the text begins every string."""
    strings = StopStrings(["a" * 255 + letter for letter in "bcdefghijklmnopq"])
    matcher = StopMatcher(strings)
    began = time.perf_counter()
    text = "".join(matcher.feed("aaaa") for _ in range(25_000)) + matcher.flush()
    assert text == "a" * 100_000
    assert time.perf_counter() - began < 5
