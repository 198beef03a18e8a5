"""The prefix index: longest resident prefix per group, eviction order, ended epochs."""

import gc
import time
from random import Random

import pytest

from control_plane.scheduling.block_ledger import BlockLedger
from control_plane.scheduling.kv_groups import KVGroups
from control_plane.scheduling.radix_index import RadixIndex
from control_plane.scheduling.residency import GroupTree, Residency, usable_prefix

ROOT = ("default", 0, "")


def make_tree(
    index: RadixIndex,
    group_id: str = "g0",
    blocks: int = 64,
    granules: int = 1,
    windows: tuple[int, ...] = (0,),
) -> GroupTree:
    kv = KVGroups(windows, granules * index.granule_tokens, chunk_tokens=8)
    return GroupTree(group_id, BlockLedger(blocks), kv)


def insert(index: RadixIndex, tree: GroupTree, token_ids, now: float, root=ROOT) -> None:
    """Caches all full blocks of a sequence, as a request that ends does."""
    size, windows = tree.kv.block_tokens, tree.kv.windows
    parent: Residency | None = None
    listed: list[Residency] = []
    window_ids: list[int] = []
    for start in range(0, len(token_ids) - size + 1, size):
        tokens = token_ids[start : start + size]
        there = index.below(tree, parent, root, tokens)
        own_ids = [tree.ledger.allocate(windowed=bool(window)) for window in windows]
        if there:
            index.heal(there, own_ids)
            for group in tree.kv.whole:
                tree.ledger.release(own_ids[group])
        else:
            there = index.extend(tree, parent, root, tokens, own_ids, now)
            listed.append(there)
        window_ids += [own_ids[group] for group in tree.kv.windowed]
        parent = there
    for residency in reversed(listed):
        index.unpin(residency, now)
    for block_id in window_ids:
        index.let_go(tree, block_id, now)


def usable_depth(index: RadixIndex, tree: GroupTree, token_ids) -> int:
    usable = usable_prefix(index.deepen(tree, None, ROOT, token_ids), len(token_ids))
    return usable.depth if usable else 0


def depth(index: RadixIndex, tree: GroupTree, token_ids) -> int:
    found = index.match(ROOT, token_ids).get(tree.group_id)
    assert index.deepen(tree, None, ROOT, token_ids) is found
    return found.depth if found else 0


def test_one_walk_finds_the_longest_prefix_of_every_group() -> None:
    index = RadixIndex(2)
    g0, g1 = make_tree(index, "g0"), make_tree(index, "g1", granules=2)
    g2 = make_tree(index, "g2")
    insert(index, g0, [1, 2, 3, 4, 5, 6], 1.0)
    insert(index, g1, [1, 2, 3, 4, 5, 6, 7, 8], 1.0)
    insert(index, g2, [9, 9], 1.0)
    found = index.match(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert {name: residency.depth for name, residency in found.items()} == {"g0": 3, "g1": 2}
    assert [r.block_ids for r in found["g0"].chain()] == [[0], [1], [2]]
    index.check_integrity([g0, g1, g2])


def test_a_group_of_larger_blocks_holds_whole_blocks_only() -> None:
    index = RadixIndex(2)
    tree = make_tree(index, granules=2)
    insert(index, tree, [1, 2, 3, 4, 5, 6], 1.0)
    assert depth(index, tree, [1, 2, 3, 4, 5, 6]) == 1
    assert depth(index, tree, [1, 2, 3, 5]) == 0


def test_roots_do_not_mix() -> None:
    index = RadixIndex(2)
    tree = make_tree(index)
    insert(index, tree, [1, 2], 1.0, root=("default", 0, "salt"))
    assert depth(index, tree, [1, 2]) == 0


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, blocks=4)
    insert(index, tree, [1, 2], 1.0)
    insert(index, tree, [3, 4], 2.0)
    chain = index.pin(index.match(ROOT, [1, 2])["g0"], 3.0)
    for residency in reversed(chain):
        index.unpin(residency, 3.0)
    remaining = []
    while index.evict(tree):
        index.check_integrity([tree])
        remaining.append((depth(index, tree, [1, 2]), depth(index, tree, [3, 4])))
    assert remaining == [(2, 1), (2, 0), (1, 0), (0, 0)]


def test_a_pinned_prefix_is_not_evicted() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, blocks=4)
    insert(index, tree, [1, 2, 3], 1.0)
    index.pin(index.match(ROOT, [1, 2])["g0"], 1.0)
    assert index.flush(tree) == 1
    assert depth(index, tree, [1, 2, 3]) == 2


def test_an_ended_epoch_is_gone_at_once_and_cleared_bit_by_bit() -> None:
    index = RadixIndex(1)
    old = make_tree(index, blocks=200)
    insert(index, old, list(range(200)), 1.0)
    index.drop(old)
    assert index.match(ROOT, [0, 1, 2]) == {}
    new = make_tree(index, blocks=200)
    insert(index, new, list(range(1000, 1100)), 2.0)
    assert depth(index, new, list(range(1000, 1100))) == 100
    index.check_integrity([new])
    assert not old.residencies, "every insertion clears some"
    assert index.flush(new) == 100
    assert not index._roots, "no node outlives its residencies"


def test_an_earlier_match_is_deepened_or_found_stale() -> None:
    index = RadixIndex(1)
    tree = make_tree(index)
    insert(index, tree, [1, 2], 1.0)
    early = index.deepen(tree, None, ROOT, [1, 2, 3, 4])
    insert(index, tree, [1, 2, 3, 4], 2.0)
    later = index.deepen(tree, early, ROOT, [1, 2, 3, 4])
    assert later
    assert later.depth == 4
    index.flush(tree)
    assert index.deepen(tree, later, ROOT, [1, 2, 3, 4]) is None


def test_a_prefix_is_of_use_up_to_where_its_window_finds_all() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, windows=(0, 3))
    insert(index, tree, range(8), 1.0)
    assert usable_depth(index, tree, range(9)) == 8
    chain = index.match(ROOT, range(8))["g0"].chain()
    assert index.forget_window(chain[5]) == 1
    # At 8 a row sees 6, 7 and itself; 6 and 7 see the sixth, which is gone.
    assert [usable_depth(index, tree, range(count)) for count in range(9)] == [
        *(0, 1, 2, 3, 4, 5, 5, 5, 8)
    ]
    assert index.forget_window(chain[6]) == 1
    assert usable_depth(index, tree, range(9)) == 5
    index.check_integrity([tree])


def test_a_hit_holds_the_whole_prefix_but_of_a_window_its_last_blocks_only() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, windows=(0, 3))
    insert(index, tree, range(8), 1.0)
    index.pin(index.match(ROOT, range(8))["g0"], 2.0)
    assert index.flush(tree) == 6
    assert tree.ledger.counts().referenced == 8 + 2
    assert usable_depth(index, tree, range(9)) == 8


def test_window_blocks_go_when_least_recently_used_and_before_a_leaf_of_the_same_time() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, windows=(0, 2))
    insert(index, tree, [1, 2], 1.0)
    insert(index, tree, [3], 2.0)
    pinned = index.pin(index.match(ROOT, [1])["g0"], 3.0)
    index.let_go(tree, pinned[0].block_of(1), 3.0)
    index.unpin(pinned[0], 3.0)
    remaining = []
    while index.evict(tree):
        index.check_integrity([tree])
        prompts = ([1, 2], [1], [3])
        remaining.append([usable_depth(index, tree, prompt) for prompt in prompts])
    assert remaining == [
        [1, 1, 1],  # the window block of [1, 2], then its leaf
        [1, 1, 1],
        [1, 1, 0],  # the same of [3]
        [1, 1, 0],
        [0, 0, 0],  # of [1], which was used last
        [0, 0, 0],
    ]


def test_with_windows_only_a_place_without_blocks_stays_as_long_as_it_leads_to_some() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, windows=(2,))
    insert(index, tree, range(5), 1.0)
    chain = index.match(ROOT, range(5))["g0"].chain()
    for link in chain[:3]:
        index.forget_window(link)
    index.check_integrity([tree])
    assert usable_depth(index, tree, range(6)) == 5
    index.forget_window(chain[4])
    assert usable_depth(index, tree, range(6)) == 4
    assert not chain[4].alive
    index.forget_window(chain[3])
    assert not tree.residencies
    assert not index._roots, "nothing leads to anything"


def test_what_is_missing_is_added_and_used_by_who_added_it_until_it_lets_go() -> None:
    index = RadixIndex(1)
    tree = make_tree(index, windows=(0, 2))
    insert(index, tree, [1, 2], 1.0)
    last = index.match(ROOT, [1, 2])["g0"]
    index.forget_window(last)
    own_id = tree.ledger.allocate(windowed=True)
    index.heal(last, [None, own_id])
    assert usable_depth(index, tree, [1, 2]) == 2
    assert index.forget_window(last) == 0, "it is in use"
    index.check_integrity([tree])
    index.forget(last)
    index.let_go(tree, own_id, 2.0)
    assert tree.ledger.counts().cached == 2
    index.check_integrity([tree])


@pytest.mark.parametrize("windows", [(0,), (0, 5), (3,), (0, 0, 4, 9)])
@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_index_whole(seed: int, windows: tuple[int, ...]) -> None:
    random, index = Random(seed), RadixIndex(2)
    blocks = 30 * len(windows)
    trees = [
        make_tree(index, "g0", blocks, windows=windows),
        make_tree(index, "g1", blocks, granules=2, windows=windows),
    ]
    for now in range(150):
        tree = random.choice(trees)
        token_ids = [random.randrange(2) for _ in range(random.randrange(12))]
        while tree.ledger.free_count < 6 * len(windows):
            assert index.evict(tree)
        insert(index, tree, token_ids, float(now))
        index.check_integrity(trees)
        size = tree.kv.block_tokens
        assert depth(index, tree, token_ids) == len(token_ids) // size
        assert usable_depth(index, tree, token_ids) == len(token_ids) // size
    for tree in trees:
        cached_count = tree.ledger.cached_count
        assert index.flush(tree) == cached_count > 0
        assert tree.ledger.free_count == blocks
        assert not tree.residencies


@pytest.mark.parametrize("windows", [(0,), (0, 4)])
def test_cost_does_not_grow_with_cached_blocks(windows: tuple[int, ...]) -> None:
    """A hundred times the cached blocks may not cost ten times the time of an eviction."""

    def evict_and_insert_s(blocks: int) -> float:
        index = RadixIndex(1)
        tree = make_tree(index, blocks=blocks, windows=windows)
        for i in range(blocks // 10 // len(windows)):
            insert(index, tree, [i, *range(9)], float(i))
        gc.disable()  # Its cost does grow.
        begin = time.thread_time()
        for i in range(200):
            while tree.ledger.free_count < len(windows):
                assert index.evict(tree)
            insert(index, tree, [-i], 1e6 + i)
        took_s = time.thread_time() - begin
        gc.enable()
        return took_s

    small = min(evict_and_insert_s(300) for _ in range(3))
    assert min(evict_and_insert_s(30_000) for _ in range(3)) < 10 * small
