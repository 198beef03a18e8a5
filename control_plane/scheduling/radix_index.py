"""The prefix index: one tree over all groups that knows which prompts' blocks are resident where.

A node is one granule of tokens; a root stands for one (model, adapter, salt). A group whose block
is n granules is resident at every n-th node of a path:

    root ─ granule ─ granule ─ granule ─ granule
    g0 (n=1)   r1 ───── r2 ────── r3 ────── r4
    g1 (n=2)            r1 ───────────────── r2

Residency is prefix-closed: the parent of a residency is one. So are pins (a request holds its
prefix from the root), so that every cached block of a KV group without a window can be evicted leaf
by leaf. Those of one with a window come and go singly, and bound what a request can use:

    KV group without a window   b0  b1  b2  b3  b4  b5
    KV group with one           --  --  --  w3  w4  --    of use up to b4: there the window needs
                                                          w3 and w4 only
"""

from collections.abc import Sequence
from typing import Any

from control_plane.scheduling.residency import Evictable, GroupTree, Node, Residency, RootKey

PURGES_PER_INSERTION = 4
"""Leftovers of ended epochs cleared with each insertion; over 1, so that they cannot pile up."""


class RadixIndex:
    """Finds, extends and evicts resident prefixes."""

    def __init__(self, granule_tokens: int) -> None:
        self.granule_tokens = granule_tokens
        self._roots: dict[RootKey, Node] = {}
        self._ended: list[GroupTree] = []

    def drop(self, tree: GroupTree) -> None:
        """Ends the residency of a whole epoch at once; its leftovers are cleared bit by bit."""
        tree.alive = False
        tree.by_block.clear()
        if tree.residencies:
            self._ended.append(tree)

    # ------------------------------------------------------------ finding

    def match(self, root_key: RootKey, token_ids: Sequence[int]) -> dict[str, Residency]:
        """The deepest residency of every group along `token_ids`, by group id; one walk."""
        found: dict[str, Residency] = {}
        node = self._roots.get(root_key)
        size = self.granule_tokens
        for start in range(0, len(token_ids) - size + 1, size):
            node = node.children.get(tuple(token_ids[start : start + size])) if node else None
            if not node:
                break
            here = node.residencies.items()
            found.update((name, residency) for name, residency in here if residency.tree.alive)
        return found

    def deepen(
        self, tree: GroupTree, known: Residency | None, root_key: RootKey, token_ids: Sequence[int]
    ) -> Residency | None:
        """The deepest residency of one group, going on from `known` (an earlier answer)."""
        found = known if known and known.alive and known.tree is tree else None
        node = found.node if found else self._roots.get(root_key)
        size = self.granule_tokens
        start = found.depth * tree.kv.block_tokens if found else 0
        for position in range(start, len(token_ids) - size + 1, size):
            node = node.children.get(tuple(token_ids[position : position + size])) if node else None
            if not node:
                break
            residency = node.residencies.get(tree.group_id)
            if residency and residency.tree is tree:
                found = residency
        return found

    def below(
        self,
        tree: GroupTree,
        parent: Residency | None,
        root_key: RootKey,
        token_ids: Sequence[int],
    ) -> Residency | None:
        """The residency of the block with these tokens that follows `parent`, if there is one."""
        node = parent.node if parent else self._roots.get(root_key)
        for key in self._granules(token_ids):
            node = node.children.get(key) if node else None
        there = node.residencies.get(tree.group_id) if node else None
        return there if there and there.tree is tree else None

    def _granules(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.granule_tokens
        starts = range(0, len(token_ids), size)
        return [tuple(token_ids[start : start + size]) for start in starts]

    # ------------------------------------------------------------ holding

    def pin(self, residency: Residency, now: float) -> list[Residency]:
        """Holds the whole chain up to a usable residency and returns it, root first; of the KV
        groups with a window, it references the last blocks only, those that are still needed."""
        tree = residency.tree
        chain = residency.chain()
        for link in chain:
            link.pins += 1
            link.last_use = now
            for block_id in link.whole_ids():
                tree.ledger.reference(block_id)
        for group in tree.kv.windowed:
            first = tree.kv.first_needed(group, residency.depth * tree.kv.block_tokens)
            for link in chain[first:]:
                tree.ledger.reference(link.block_of(group))
        return chain

    def unpin(self, residency: Residency, now: float) -> None:
        """Holds a place no longer, nor its blocks without a window; children before parents."""
        residency.pins -= 1
        residency.last_use = now
        for block_id in residency.whole_ids():
            residency.tree.ledger.release(block_id)
        self._settle(residency)

    def let_go(self, tree: GroupTree, block_id: int, now: float) -> None:
        """Drops one reference to a block with a window; if it is listed, it stays cached."""
        tree.ledger.release(block_id)
        residency = tree.by_block.get(block_id)
        if residency and not tree.ledger.references(block_id):
            residency.window_use = now
            tree.offer(residency, Evictable.WINDOW_IDS)

    # ------------------------------------------------------------ listing

    def extend(
        self,
        tree: GroupTree,
        parent: Residency | None,
        root_key: RootKey,
        token_ids: Sequence[int],
        block_ids: list[int | None],
        now: float,
    ) -> Residency:
        """Lists the referenced blocks of a place below `parent` where nothing is resident yet (see
        `below`); whoever lists them holds the place."""
        self._purge(PURGES_PER_INSERTION)
        root = None if parent else self._roots.setdefault(root_key, Node(None, root_key))
        node = parent.node if parent else root
        assert node, root_key
        for key in self._granules(token_ids):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key)
            node = child
        there = node.residencies.get(tree.group_id)
        assert there is None or there.tree is not tree, "nothing is resident here yet"
        residency = Residency(tree, node, parent, block_ids, now)
        node.residencies[tree.group_id] = residency
        tree.residencies[residency] = None
        for block_id in block_ids:
            if block_id is not None:
                tree.by_block[block_id] = residency
                tree.ledger.mark_indexed(block_id)
        if parent:
            parent.children_count += 1
        return residency

    def heal(self, residency: Residency, block_ids: list[int | None]) -> None:
        """Lists, of the same tokens' referenced blocks, those with a window that are missing."""
        tree = residency.tree
        for group in tree.kv.windowed:
            block_id = block_ids[group]
            if block_id is not None and residency.block_ids[group] is None:
                residency.block_ids[group] = block_id
                tree.by_block[block_id] = residency
                tree.ledger.mark_indexed(block_id)
                tree.added_count += 1

    # ------------------------------------------------------------ letting go of cached blocks

    def evict(self, tree: GroupTree) -> int:
        """Frees what was least recently used of the cached blocks of a group, a place's at once;
        returns how many, 0 if nothing is cached."""
        while (oldest := tree.take()) is not None:
            residency, kind = oldest
            is_leaf = kind is Evictable.LEAF
            freed_count = self.forget(residency) if is_leaf else self.forget_window(residency)
            if freed_count:
                return freed_count
        return 0

    def flush(self, tree: GroupTree) -> int:
        """Frees every cached block of a group and returns how many there were."""
        count = 0
        while freed_count := self.evict(tree):
            count += freed_count
        return count

    def forget(self, residency: Residency) -> int:
        """Takes a leaf that nobody holds out of the index and returns how many blocks that frees;
        one with a window may be in use by a request that added it in passing."""
        tree = residency.tree
        assert residency.is_unheld_leaf, residency.block_ids
        freed_count = 0
        for block_id in residency.block_ids:
            if block_id is None:
                continue
            del tree.by_block[block_id]
            if tree.ledger.references(block_id):
                tree.ledger.unmark_indexed(block_id)
            else:
                tree.ledger.evict(block_id)
                freed_count += 1
        self._remove(residency)
        return freed_count

    def forget_window(self, residency: Residency) -> int:
        """Frees the idle blocks with a window of a residency and returns how many there were."""
        tree = residency.tree
        idle = residency.idle_window_ids()
        for group, block_id in idle.items():
            residency.block_ids[group] = None
            del tree.by_block[block_id]
            tree.ledger.evict(block_id)
            tree.removed_count += 1
        if residency.is_needless:
            self._remove(residency)
        return len(idle)

    def _settle(self, residency: Residency) -> None:
        """Queues a residency that has become a leaf for eviction; a needless one goes at once."""
        if residency.is_needless:
            self._remove(residency)
        else:
            residency.tree.offer(residency, Evictable.LEAF)

    def _remove(self, residency: Residency) -> None:
        """Takes a residency out, and above it those that are needless without it."""
        link: Residency | None = residency
        while link:
            del link.tree.residencies[link]
            self._detach(link)
            parent = link.parent
            if parent is None:
                return
            parent.children_count -= 1
            if not parent.is_needless:
                parent.tree.offer(parent, Evictable.LEAF)
                return
            link = parent

    # ------------------------------------------------------------ upkeep

    def check_integrity(self, trees: Sequence[GroupTree]) -> None:
        """Asserts that residency and pins are prefix-closed, that children are counted, and that
        what is listed, pinned, referenced and queued agrees."""
        for tree in trees:
            children_counts = dict.fromkeys(tree.residencies, 0)
            listed: dict[int, Residency] = {}
            for residency in tree.residencies:
                self._check_place(residency)
                for block_id in residency.block_ids:
                    if block_id is not None:
                        listed[block_id] = residency
                if residency.parent:
                    assert residency.parent.alive, "residency is prefix-closed"
                    assert residency.parent.pins >= residency.pins, "pins are prefix-closed"
                    children_counts[residency.parent] += 1
            assert listed == tree.by_block, "what is listed"
            for residency, count in children_counts.items():
                assert residency.children_count == count, "children are counted"
                assert not residency.is_needless, "what is needless is gone"
            tree.check_queue()

    def _check_place(self, residency: Residency) -> None:
        tree = residency.tree
        assert residency.node.residencies[tree.group_id] is residency
        node: Node | None = residency.node
        for _ in range(tree.kv.block_tokens // self.granule_tokens):
            assert node
            node = node.parent
        if residency.parent:
            assert residency.parent.node is node, "residency is prefix-closed"
        else:
            assert node in self._roots.values(), "a first block hangs below its root"
        for group in tree.kv.whole:
            references = tree.ledger.references(residency.block_of(group))
            assert references == residency.pins, "who holds a place references its blocks"

    def _purge(self, count: int) -> None:
        while self._ended and count:
            tree = self._ended[-1]
            residency, _ = tree.residencies.popitem()
            self._detach(residency)
            count -= 1
            if not tree.residencies:
                self._ended.pop()

    def _detach(self, residency: Residency) -> None:
        """Takes a residency off its node, and the nodes that serve nobody any more off the tree."""
        node = residency.node
        if node.residencies.get(residency.tree.group_id) is residency:
            del node.residencies[residency.tree.group_id]
        while not node.residencies and not node.children:
            siblings: dict[Any, Node] = node.parent.children if node.parent else self._roots
            if siblings.get(node.key) is node:
                del siblings[node.key]
            if node.parent is None:
                break
            node = node.parent
