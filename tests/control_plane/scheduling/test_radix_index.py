"""The prefix index: longest resident prefix per group, eviction order, ended epochs."""

import gc
import time
from random import Random

import pytest

from control_plane.scheduling.block_ledger import BlockLedger
from control_plane.scheduling.radix_index import GroupTree, RadixIndex, Residency

ROOT = ("default", 0, "")


def make_tree(group_id: str = "g0", blocks: int = 64, granules: int = 1) -> GroupTree:
    return GroupTree(group_id, BlockLedger(blocks), granules)


def insert(index: RadixIndex, tree: GroupTree, token_ids, now: float, root=ROOT) -> None:
    """Caches all full blocks of a sequence, as a request that ends does."""
    size = index.granule_tokens * tree.block_granules
    parent: Residency | None = None
    listed: list[Residency] = []
    for start in range(0, len(token_ids) - size + 1, size):
        block_id = tree.ledger.allocate()
        parent = index.extend(tree, parent, root, token_ids[start : start + size], block_id, now)
        if parent.block_id == block_id:
            listed.append(parent)
        else:
            tree.ledger.release(block_id)
    for residency in reversed(listed):
        index.unpin(residency, now)


def depth(index: RadixIndex, tree: GroupTree, token_ids) -> int:
    found = index.match(ROOT, token_ids).get(tree.group_id)
    assert index.deepen(tree, None, ROOT, token_ids) is found
    return found.depth if found else 0


def test_one_walk_finds_the_longest_prefix_of_every_group() -> None:
    index = RadixIndex(2)
    g0, g1, g2 = make_tree("g0"), make_tree("g1", granules=2), make_tree("g2")
    insert(index, g0, [1, 2, 3, 4, 5, 6], 1.0)
    insert(index, g1, [1, 2, 3, 4, 5, 6, 7, 8], 1.0)
    insert(index, g2, [9, 9], 1.0)
    found = index.match(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert {name: residency.depth for name, residency in found.items()} == {"g0": 3, "g1": 2}
    assert [r.block_id for r in found["g0"].chain()] == [0, 1, 2]
    index.check_integrity([g0, g1, g2])


def test_a_group_of_larger_blocks_holds_whole_blocks_only() -> None:
    index, tree = RadixIndex(2), make_tree(granules=2)
    insert(index, tree, [1, 2, 3, 4, 5, 6], 1.0)
    assert depth(index, tree, [1, 2, 3, 4, 5, 6]) == 1
    assert depth(index, tree, [1, 2, 3, 5]) == 0


def test_roots_do_not_mix() -> None:
    index, tree = RadixIndex(2), make_tree()
    insert(index, tree, [1, 2], 1.0, root=("default", 0, "salt"))
    assert depth(index, tree, [1, 2]) == 0


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    index, tree = RadixIndex(1), make_tree(blocks=4)
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
    index, tree = RadixIndex(1), make_tree(blocks=4)
    insert(index, tree, [1, 2, 3], 1.0)
    index.pin(index.match(ROOT, [1, 2])["g0"], 1.0)
    assert index.flush(tree) == 1
    assert depth(index, tree, [1, 2, 3]) == 2


def test_an_ended_epoch_is_gone_at_once_and_cleared_bit_by_bit() -> None:
    index, old = RadixIndex(1), make_tree(blocks=200)
    insert(index, old, list(range(200)), 1.0)
    index.drop(old)
    assert index.match(ROOT, [0, 1, 2]) == {}
    new = make_tree(blocks=200)
    insert(index, new, list(range(1000, 1100)), 2.0)
    assert depth(index, new, list(range(1000, 1100))) == 100
    index.check_integrity([new])
    assert not old.by_block, "every insertion clears some"
    assert index.flush(new) == 100
    assert not index._roots, "no node outlives its residencies"


def test_an_earlier_match_is_deepened_or_found_stale() -> None:
    index, tree = RadixIndex(1), make_tree()
    insert(index, tree, [1, 2], 1.0)
    early = index.deepen(tree, None, ROOT, [1, 2, 3, 4])
    insert(index, tree, [1, 2, 3, 4], 2.0)
    later = index.deepen(tree, early, ROOT, [1, 2, 3, 4])
    assert later
    assert later.depth == 4
    index.flush(tree)
    assert index.deepen(tree, later, ROOT, [1, 2, 3, 4]) is None


@pytest.mark.parametrize("seed", range(10))
def test_random_use_keeps_the_index_whole(seed: int) -> None:
    random, index = Random(seed), RadixIndex(2)
    trees = [make_tree("g0", 30), make_tree("g1", 30, granules=2)]
    for now in range(150):
        tree = random.choice(trees)
        token_ids = [random.randrange(2) for _ in range(random.randrange(12))]
        while tree.ledger.free_count < 6:
            assert index.evict(tree)
        insert(index, tree, token_ids, float(now))
        index.check_integrity(trees)
        size = 2 * tree.block_granules
        assert depth(index, tree, token_ids) == len(token_ids) // size


def test_cost_does_not_grow_with_cached_blocks() -> None:
    """A hundred times the cached blocks may not cost ten times the time of an eviction."""

    def evict_and_insert_s(blocks: int) -> float:
        index, tree = RadixIndex(1), make_tree(blocks=blocks)
        for i in range(blocks // 10):
            insert(index, tree, [i, *range(9)], float(i))
        gc.disable()  # Its cost does grow.
        begin = time.thread_time()
        for i in range(200):
            index.evict(tree)
            insert(index, tree, [-i], 1e6 + i)
        took_s = time.thread_time() - begin
        gc.enable()
        return took_s

    small = min(evict_and_insert_s(300) for _ in range(3))
    assert min(evict_and_insert_s(30_000) for _ in range(3)) < 10 * small
