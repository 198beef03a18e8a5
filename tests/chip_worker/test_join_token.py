"""The secret of a worker, from a file: what cannot be one is said before anything starts."""

from pathlib import Path

import pytest

from chip_worker.__main__ import read_join_token
from chip_worker.errors import ConfigurationError


def test_the_token_is_the_file_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert read_join_token(path) == "secret"


@pytest.mark.parametrize(
    ("content", "says"), [(b" \n", "is empty; write the secret"), (b"\xff", "utf-8")], ids=str
)
def test_what_is_no_token_is_refused_with_the_file_s_name(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=says) as raised:
        read_join_token(path)
    assert str(path) in str(raised.value)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_join_token(tmp_path / "token")
