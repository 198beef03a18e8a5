"""How often the whole process is searched for garbage."""

import gc

from control_plane.full_collections import rare_full_collections

LONG_LIVED = 1_500_000


def full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def test_what_comes_to_stay_is_not_searched_again_and_again() -> None:
    thresholds = gc.get_threshold()
    with rare_full_collections():
        before = full_collections()
        kept = [[] for _ in range(LONG_LIVED)]
        assert full_collections() == before
    assert len(kept) == LONG_LIVED
    assert gc.get_threshold() == thresholds
