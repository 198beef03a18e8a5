"""JSON that any client can read line by line."""

import json

import pytest

from control_plane.intake.http_json import SLICE_ENTRIES, dump, dump_long


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


LONG = 3 * SLICE_ENTRIES + 1


@pytest.mark.parametrize("count", [0, 1, SLICE_ENTRIES, SLICE_ENTRIES + 1, 2 * SLICE_ENTRIES, LONG])
def test_long_lists_are_written_alike(count: int) -> None:
    content = {
        "a": list(range(count)),
        "b": {"tops": [{"é\u2028": i, "x": None} for i in range(count)], "empty": []},
        "c": tuple(map(str, range(count))),
        "d": None,
    }
    assert dump_long(content) == dump(content)


def test_no_call_writes_a_long_list_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the library writes, no other thread runs."""
    sizes = []
    dumps = json.dumps

    def measured(content: object, **options: object) -> str:
        text = dumps(content, **options)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(json, "dumps", measured)
    written = dump_long({"logprobs": {"content": [{"token": "abc"}] * 100_000}})
    assert len(written) > 1_000_000
    assert max(sizes) < 20_000
