"""The order in which people read names of workers and groups: chip2 before chip10."""

import re


def name_order(name: str) -> tuple[list[str | int], str]:
    """Key to sort names by: numbers in them count as such, the rest as text."""
    # Text and number by turns, text first: so only like is compared with like.
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name
