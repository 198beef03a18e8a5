"""What tables over KV groups cost, need and drop, against counting token by token."""

import pytest

from control_plane.scheduling.kv_groups import SLACK_BLOCKS, KVGroups

SHAPES = [
    KVGroups((window,), block_tokens, chunk_tokens)
    for window in (1, 2, 7, 8, 9, 40)
    for block_tokens in (1, 4, 16)
    for chunk_tokens in (1, 5, 64)
]


@pytest.mark.parametrize("kv", SHAPES, ids=str)
def test_a_row_finds_what_its_first_token_sees_and_no_block_too_many(kv: KVGroups) -> None:
    (window,), size = kv.windows, kv.block_tokens
    for position in range(200):
        seen = range(max(0, position - window + 1), position)
        first = kv.first_needed(0, position)
        assert first == min((token // size for token in seen), default=position // size)
        assert kv.first_kept(0, position) == max(0, first - SLACK_BLOCKS)


@pytest.mark.parametrize("kv", SHAPES, ids=str)
def test_no_row_needs_more_blocks_than_a_table_may_hold_and_some_row_needs_them(kv) -> None:
    spans = [
        kv.blocks_for(position + count) - kv.first_kept(0, position)
        for position in range(200, 300)
        for count in range(1, kv.chunk_tokens + 1)
    ]
    assert max(spans) == kv.held_max(0)


def test_a_group_without_a_window_costs_a_block_for_every_block_of_tokens() -> None:
    kv = KVGroups((0,), 4, 16)
    assert [kv.cost(tokens) for tokens in (0, 1, 4, 5, 400)] == [0, 1, 1, 2, 100]
    assert kv.cost(400, 30) == 70
    assert kv.tokens_max(25, 1000) == 100
    assert kv.tokens_max(25, 90) == 90


def test_a_window_bounds_the_cost() -> None:
    kv = KVGroups((0, 8, 8), 4, 4)
    assert kv.held_max(1) == 6
    assert kv.cost(8) == 3 * 2
    assert kv.cost(4000) == 1000 + 2 * 6
    # A prefix of 500 blocks: of those with a window, the two that the window needs count, too.
    assert kv.cost(2008, 500) == 2 + 2 * (2 + 2)
    assert kv.tokens_max(1000 + 12, 10_000) == 4000
    assert kv.tokens_max(3 * 5 + 2, 10_000) == 5 * 4, "a third block would have to be there"


def test_with_windows_only_memory_bounds_no_request_once_it_holds_them() -> None:
    kv = KVGroups((8,), 4, 4)
    assert kv.tokens_max(6, 10_001) == 10_001
    assert kv.tokens_max(5, 10_001) == 20
