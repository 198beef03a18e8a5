"""Who is let in by which header."""

import pytest

from control_plane.errors import Unauthenticated
from control_plane.intake.api_keys import ApiKeys, is_key

KEYS = ApiKeys(("first-key", "second-key"))


@pytest.mark.parametrize(
    "header",
    ["Bearer first-key", "Bearer second-key", "bearer first-key", "  BEARER   first-key  "],
)
def test_every_key_of_the_service_opens_it(header):
    KEYS.check(header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "first-key",
        "Basic first-key",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer FIRST-KEY",
        "Bearer first-key,second-key",
        "Bearer \ud800",
        "Bearer " + "x" * 100_000,
    ],
)
def test_anything_else_is_refused_without_repeating_it(header):
    with pytest.raises(Unauthenticated) as caught:
        KEYS.check(header)
    assert caught.value.field == "authorization"
    assert "Bearer KEY" in caught.value.message or "not known" in caught.value.message
    assert "x" * 20 not in caught.value.message
    assert "first-key" not in caught.value.message


@pytest.mark.parametrize("header", [None, "", "Bearer anything"])
def test_without_keys_everybody_may(header):
    ApiKeys(()).check(header)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k", True),
        ("sk-!~_AZ09", True),
        ("", False),
        ("two words", False),
        ("schl\u00fcssel", False),
        ("tab\t", False),
        ("delete\x7f", False),
    ],
)
def test_a_key_is_what_a_header_can_carry(text, expected):
    assert is_key(text) is expected
