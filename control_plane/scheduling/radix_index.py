"""The prefix index: one tree over all groups that knows which prompts' blocks are resident where.

A node is one granule of tokens; a root stands for one (model, adapter, salt). A group whose block
is n granules is resident at every n-th node of a path:

    root ─ granule ─ granule ─ granule ─ granule
    g0 (n=1)   r1 ───── r2 ────── r3 ────── r4
    g1 (n=2)            r1 ───────────────── r2

Residency is prefix-closed: the parent of a resident block is resident. References are prefix-closed
too (a request holds its prefix from the root), so every cached block can be evicted leaf by leaf.
"""

import heapq
from collections.abc import Sequence
from typing import Any

from control_plane.scheduling.block_ledger import BlockLedger

RootKey = tuple[str, int, str]
"""(model, adapter, salt)."""

PURGES_PER_INSERTION = 4
"""Leftovers of ended epochs cleared with each insertion; over 1, so that they cannot pile up."""


class Node:
    """One granule of tokens below its parent."""

    __slots__ = ("children", "key", "parent", "residencies")

    def __init__(self, parent: "Node | None", key: tuple[int, ...] | RootKey) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[tuple[int, ...], Node] = {}
        self.residencies: dict[str, Residency] = {}


class Residency:
    """A block of one group in one epoch; `depth` counts the blocks from the root to it."""

    __slots__ = (
        "block_id",
        "children_count",
        "depth",
        "last_use",
        "node",
        "parent",
        "stamp",
        "tree",
    )

    def __init__(
        self, tree: "GroupTree", node: Node, parent: "Residency | None", block_id: int
    ) -> None:
        self.tree = tree
        self.node = node
        self.parent = parent
        self.block_id = block_id
        self.depth: int = parent.depth + 1 if parent else 1
        self.children_count = 0
        self.last_use = 0.0
        self.stamp = 0

    @property
    def alive(self) -> bool:
        """Whether it is still resident (neither evicted nor of an ended epoch)."""
        return self.tree.alive and self.tree.by_block.get(self.block_id) is self

    def chain(self) -> "list[Residency]":
        """The residencies from the root to this one."""
        found: list[Residency] = []
        residency: Residency | None = self
        while residency:
            found.append(residency)
            residency = residency.parent
        return found[::-1]


class GroupTree:
    """One epoch of a group in the index: its ledger, its blocks, its queue of evictable leaves."""

    def __init__(self, group_id: str, ledger: BlockLedger, block_granules: int) -> None:
        self.group_id = group_id
        self.ledger = ledger
        self.block_granules = block_granules
        self.alive = True
        self.by_block: dict[int, Residency] = {}
        self._leaves: list[tuple[float, int, Residency]] = []
        self._stamp = 0

    def offer_leaf(self, residency: Residency) -> None:
        """Queues a residency for eviction if it is a leaf nobody references."""
        if residency.children_count or self.ledger.references(residency.block_id):
            return
        self._stamp += 1
        residency.stamp = self._stamp
        heapq.heappush(self._leaves, (residency.last_use, self._stamp, residency))
        if len(self._leaves) > 2 * len(self.by_block) + 64:
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)

    def take_leaf(self) -> Residency | None:
        """The least recently used leaf nobody references, off the queue."""
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._is_current(entry):
                return entry[2]
        return None

    def _is_current(self, entry: tuple[float, int, Residency]) -> bool:
        _, stamp, residency = entry
        return (
            stamp == residency.stamp
            and residency.alive
            and not residency.children_count
            and not self.ledger.references(residency.block_id)
        )


class RadixIndex:
    """Finds, extends and evicts resident prefixes."""

    def __init__(self, granule_tokens: int) -> None:
        self.granule_tokens = granule_tokens
        self._roots: dict[RootKey, Node] = {}
        self._ended: list[GroupTree] = []

    def drop(self, tree: GroupTree) -> None:
        """Ends the residency of a whole epoch at once; its leftovers are cleared bit by bit."""
        tree.alive = False
        if tree.by_block:
            self._ended.append(tree)

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
        start = found.depth * tree.block_granules * size if found else 0
        for position in range(start, len(token_ids) - size + 1, size):
            node = node.children.get(tuple(token_ids[position : position + size])) if node else None
            if not node:
                break
            residency = node.residencies.get(tree.group_id)
            if residency and residency.tree is tree:
                found = residency
        return found

    def pin(self, residency: Residency, now: float) -> list[Residency]:
        """References the whole chain up to a residency and returns it, root first."""
        chain = residency.chain()
        for link in chain:
            link.tree.ledger.reference(link.block_id)
            link.last_use = now
        return chain

    def unpin(self, residency: Residency, now: float) -> None:
        """Drops one reference; children before their parents."""
        residency.tree.ledger.release(residency.block_id)
        residency.last_use = now
        residency.tree.offer_leaf(residency)

    def extend(
        self,
        tree: GroupTree,
        parent: Residency | None,
        root_key: RootKey,
        block_tokens: Sequence[int],
        block_id: int,
        now: float,
    ) -> Residency:
        """Lists a referenced block with its tokens below `parent`.

        Returns the residency of that place: of another block if one was there before.
        """
        self._purge(PURGES_PER_INSERTION)
        root = None if parent else self._roots.setdefault(root_key, Node(None, root_key))
        node = parent.node if parent else root
        assert node, root_key
        size = self.granule_tokens
        for start in range(0, len(block_tokens), size):
            key = tuple(block_tokens[start : start + size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key)
            node = child
        there = node.residencies.get(tree.group_id)
        if there and there.tree is tree:
            return there
        residency = Residency(tree, node, parent, block_id)
        residency.last_use = now
        node.residencies[tree.group_id] = residency
        tree.by_block[block_id] = residency
        tree.ledger.mark_indexed(block_id)
        if parent:
            parent.children_count += 1
        return residency

    def evict(self, tree: GroupTree) -> bool:
        """Frees the least recently used cached leaf of a group; False if nothing is cached."""
        residency = tree.take_leaf()
        if residency is None:
            return False
        self.forget(residency)
        return True

    def flush(self, tree: GroupTree) -> int:
        """Frees every cached block of a group and returns how many there were."""
        count = 0
        while self.evict(tree):
            count += 1
        return count

    def forget(self, residency: Residency) -> None:
        """Frees one cached leaf."""
        tree = residency.tree
        assert not residency.children_count, residency.block_id
        del tree.by_block[residency.block_id]
        tree.ledger.evict(residency.block_id)
        self._detach(residency)
        if residency.parent:
            residency.parent.children_count -= 1
            tree.offer_leaf(residency.parent)

    def check_integrity(self, trees: Sequence[GroupTree]) -> None:
        """Asserts that residency and references are prefix-closed and children are counted."""
        for tree in trees:
            children_counts = dict.fromkeys(tree.by_block, 0)
            for block_id, residency in tree.by_block.items():
                assert residency.block_id == block_id
                assert residency.node.residencies[tree.group_id] is residency
                parent = residency.parent
                node: Node | None = residency.node
                for _ in range(tree.block_granules):
                    assert node
                    node = node.parent
                if parent is None:
                    assert node in self._roots.values(), "a first block hangs below its root"
                    continue
                assert parent.alive, "residency is prefix-closed"
                assert parent.node is node, "residency is prefix-closed"
                children_counts[parent.block_id] += 1
                references = tree.ledger.references
                assert references(parent.block_id) >= references(block_id), "references are too"
            for block_id, count in children_counts.items():
                assert tree.by_block[block_id].children_count == count, "children are counted"

    def _purge(self, count: int) -> None:
        while self._ended and count:
            tree = self._ended[-1]
            _, residency = tree.by_block.popitem()
            self._detach(residency)
            count -= 1
            if not tree.by_block:
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
