"""Prompts as token ids for the scenarios."""

import random

from tests.fakes.field_tokenizers import SIZE, UNKNOWN


def random_ids(seed: object, count: int) -> list[int]:
    """Ordinary tokens; equal seeds give equal beginnings. No other seed has the same."""
    generator = random.Random(repr(seed))
    return [generator.randrange(UNKNOWN + 1, SIZE) for _ in range(count)]
