"""What the prefix index says of one group: which blocks stand at which places, and which may go.

Cached blocks can be evicted in two ways, the least recently used first:

    leaf        a residency without children that no request holds, with all its blocks
    window ids  a residency's blocks behind a window, wherever it stands; it stays as a tombstone
"""

import heapq
from dataclasses import dataclass
from enum import IntEnum

from control_plane.scheduling.block_ledger import BlockLedger
from control_plane.scheduling.kv_groups import KVGroups

RootKey = tuple[str, int, str]
"""(model, adapter, salt)."""


class Node:
    """One granule of tokens below its parent."""

    __slots__ = ("children", "key", "parent", "residencies")

    def __init__(self, parent: "Node | None", key: tuple[int, ...] | RootKey) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[tuple[int, ...], Node] = {}
        self.residencies: dict[str, Residency] = {}


class Residency:
    """The blocks of one place in one group and epoch; `depth` counts the places from the root on.

    block_ids: one for each KV group, None where one with a window is not resident. pins: placements
    that hold the place, each with a reference to its blocks of the groups without a window.
    last_use: of the place; window_use: when the last of its blocks with a window was let go.
    """

    __slots__ = (
        "block_ids",
        "children_count",
        "depth",
        "last_use",
        "node",
        "parent",
        "pins",
        "stamps",
        "tree",
        "window_use",
    )

    def __init__(
        self,
        tree: "GroupTree",
        node: Node,
        parent: "Residency | None",
        block_ids: list[int | None],
        now: float,
    ) -> None:
        self.tree = tree
        self.node = node
        self.parent = parent
        self.block_ids = block_ids
        self.depth: int = parent.depth + 1 if parent else 1
        self.children_count = 0
        self.pins = 1
        self.last_use = now
        self.window_use = now
        self.stamps = [0, 0]

    @property
    def alive(self) -> bool:
        """Whether it is still resident (neither evicted nor of an ended epoch)."""
        return self.tree.alive and self in self.tree.residencies

    @property
    def is_unheld_leaf(self) -> bool:
        """Whether nothing stands below it and nobody holds it."""
        return not (self.children_count or self.pins)

    @property
    def is_needless(self) -> bool:
        """Whether it holds no block, no child, and nobody holds it."""
        return self.is_unheld_leaf and all(block_id is None for block_id in self.block_ids)

    def chain(self) -> "list[Residency]":
        """The residencies from the root to this one."""
        found: list[Residency] = []
        residency: Residency | None = self
        while residency:
            found.append(residency)
            residency = residency.parent
        return found[::-1]

    def block_of(self, group: int) -> int:
        """Its block of a KV group, which is resident: as every one without a window."""
        block_id = self.block_ids[group]
        assert block_id is not None, (self.depth, group)
        return block_id

    def whole_ids(self) -> list[int]:
        """Its blocks of the KV groups without a window."""
        return [self.block_of(group) for group in self.tree.kv.whole]

    def idle_window_ids(self) -> dict[int, int]:
        """By KV group its blocks with a window that nobody references."""
        references = self.tree.ledger.references
        found: dict[int, int] = {}
        for group in self.tree.kv.windowed:
            block_id = self.block_ids[group]
            if block_id is not None and not references(block_id):
                found[group] = block_id
        return found


def usable_prefix(residency: Residency | None, depth_max: int) -> Residency | None:
    """The deepest of a residency and those above it, at most `depth_max` places from the root, from
    which a request can go on: what its windows need before it is resident."""
    while residency and residency.depth > depth_max:
        residency = residency.parent
    while residency:
        lacking = _lacking_window_ids(residency)
        if lacking is None:
            return residency
        # Whatever is deeper than the place above needs this one, too.
        residency = lacking.parent
    return None


def _lacking_window_ids(residency: Residency) -> Residency | None:
    """The first place, going up, without a block that a window needs at the end of a prefix."""
    kv = residency.tree.kv
    position = residency.depth * kv.block_tokens
    first_places = [(group, kv.first_needed(group, position)) for group in kv.windowed]
    first_place = min((first for _, first in first_places), default=residency.depth)
    link: Residency | None = residency
    while link and link.depth > first_place:
        if None in link.block_ids and any(
            link.depth > first and link.block_ids[group] is None for group, first in first_places
        ):
            return link
        link = link.parent
    return None


@dataclass(frozen=True, slots=True)
class Match:
    """What was found for a request: the deepest residency, the deepest of use, and how often blocks
    had been added to the tree's residencies, and removed from them, by then."""

    deepest: Residency | None
    usable: Residency | None
    added_count: int
    removed_count: int


class Evictable(IntEnum):
    """A kind of cached blocks; of two last used at the same time the first goes first."""

    WINDOW_IDS = 0
    LEAF = 1


class GroupTree:
    """One epoch of a group in the index: its ledger, its residencies, its queue of what may go.

    added_count: how often a block was added to a residency that lacked it. removed_count: how often
    one with a window was taken from a residency. (A residency goes only if none stands below it.)
    While neither changes, a request can use as much of the chain of a place as before.
    """

    def __init__(self, group_id: str, ledger: BlockLedger, kv: KVGroups) -> None:
        self.group_id = group_id
        self.ledger = ledger
        self.kv = kv
        self.alive = True
        self.added_count = 0
        self.removed_count = 0
        self.residencies: dict[Residency, None] = {}
        self.by_block: dict[int, Residency] = {}
        self._queue: list[tuple[float, Evictable, int, Residency]] = []
        self._stamp = 0

    def offer(self, residency: Residency, kind: Evictable) -> None:
        """Queues what can go of a residency; what cannot, after all, is passed over in its turn."""
        if not self._can_go(residency, kind):
            return
        self._stamp += 1
        residency.stamps[kind] = self._stamp
        used_at = residency.last_use if kind is Evictable.LEAF else residency.window_use
        heapq.heappush(self._queue, (used_at, kind, self._stamp, residency))
        if len(self._queue) > 4 * len(self.residencies) + 64:
            self._queue = [entry for entry in self._queue if self._is_current(entry)]
            heapq.heapify(self._queue)

    def take(self) -> tuple[Residency, Evictable] | None:
        """What was least recently used of all that can go, off the queue."""
        while self._queue:
            entry = heapq.heappop(self._queue)
            if self._is_current(entry):
                return entry[3], entry[1]
        return None

    def check_queue(self) -> None:
        """Asserts that every cached block can be evicted, so that what is available can be had."""
        queued = {(entry[3], entry[1]) for entry in self._queue if self._is_current(entry)}
        for residency in self.residencies:
            if residency.is_unheld_leaf:
                assert (residency, Evictable.LEAF) in queued, residency.block_ids
            if self.kv.windowed and residency.idle_window_ids():
                assert (residency, Evictable.WINDOW_IDS) in queued, residency.block_ids

    def _can_go(self, residency: Residency, kind: Evictable) -> bool:
        if kind is Evictable.LEAF:
            return residency.is_unheld_leaf
        return bool(residency.idle_window_ids())

    def _is_current(self, entry: tuple[float, Evictable, int, Residency]) -> bool:
        _, kind, stamp, residency = entry
        is_newest = stamp == residency.stamps[kind]
        return is_newest and residency.alive and self._can_go(residency, kind)
