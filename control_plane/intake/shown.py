"""Texts of clients in messages for people: quoted, and no more of them than one wants to read."""

CHARACTERS_MAX = 80


def shown(text: str) -> str:
    """The text in quotes, cut if it is long; on one line, whatever is in it."""
    return repr(shortened(text))


def shortened(text: str) -> str:
    """The text itself, cut if it is long."""
    return text if len(text) <= CHARACTERS_MAX else text[:CHARACTERS_MAX] + "..."
