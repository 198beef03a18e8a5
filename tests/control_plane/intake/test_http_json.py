"""JSON that any client can read line by line."""

import json

import pytest

from control_plane.intake.http_json import dump


@pytest.mark.parametrize(
    "text", ["a\x85b", "\u2028", "x\u2029\n", "\x0b\x0c\x1c\x1d\x1e\r", "ü你👍"]
)
def test_what_is_written_is_one_line_to_everybody(text: str) -> None:
    content = {"text": text, "tokens": [text]}
    written = dump(content)
    assert len(written.decode().splitlines()) == 1
    assert json.loads(written) == content


def test_half_a_character_of_a_client_is_escaped() -> None:
    assert dump("\ud800\u2028") == b'"\\ud800\\u2028"'


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        dump({"logprob": float("-inf")})
