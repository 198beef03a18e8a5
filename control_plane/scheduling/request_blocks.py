"""The blocks of the requests of one group: match and pin at admission, grow, index, give back.

                 matched          computed                  planned
    |--- shared ---|--- own, full ---|--- own, being written ---|
    in the index    enters the index   block tables grow with the rows
                    once acknowledged

A shared block is never written: a request's rows start behind what it matched.

    RequestBlocks -> TableRoom (allocates, drops)      -> BlockLedger
                  -> PrefixListing (lists, claims)     -> RadixIndex
"""

from collections.abc import Callable

from control_plane.scheduling.live_request import LiveRequest, Placement
from control_plane.scheduling.prefix_claims import PrefixClaims
from control_plane.scheduling.prefix_listing import PrefixListing
from control_plane.scheduling.radix_index import RadixIndex
from control_plane.scheduling.residency import GroupTree, Match, Residency, usable_prefix
from control_plane.scheduling.table_room import TableChange, TableRoom


class RequestBlocks:
    """Block tables over one group's ledger and its part of the index.

    reserve_after: retractions after which a request takes every block it can ever need.
    """

    def __init__(self, index: RadixIndex, tree: GroupTree, *, reserve_after: int) -> None:
        self.kv = tree.kv
        self.block_tokens = tree.kv.block_tokens
        self._index = index
        self._tree = tree
        self._ledger = tree.ledger
        self._reserve_after = reserve_after
        self.tables = TableRoom(index, tree)
        self._claims = PrefixClaims(self.block_tokens)
        self._listing = PrefixListing(index, tree, self._claims)

    # ------------------------------------------------------------ before admission

    def matched_tokens(self, live: LiveRequest) -> int:
        """Tokens of its resident prefix that it could use now."""
        residency = self._match(live)
        return residency.depth * self.block_tokens if residency else 0

    def is_claimed(self, live: LiveRequest) -> bool:
        """Whether its first missing block is being computed by a running request."""
        if not live.uses_cache:
            return False
        residency = self._match(live)
        depth = residency.depth if residency else 0
        matchable = live.matchable_blocks(self.block_tokens)
        return depth < matchable and self._claims.holds(live, depth)

    def admit(self, live: LiveRequest, headroom_blocks: int, now: float) -> Placement | None:
        """Matches, pins and allocates at once; None (and nothing changed) if blocks do not suffice.

        The slot of the returned placement is for the caller to fill in.
        """
        residency = self._match(live)
        depth = residency.depth if residency else 0
        known_count = len(live.token_ids)
        reserved = live.retractions >= self._reserve_after
        needed = self.kv.cost(self._wanted_tokens(live, reserved), depth)
        available = self._ledger.available_count - headroom_blocks
        if needed > available or needed > available - self._cached_count(residency):
            return None
        chain = self._index.pin(residency, now) if residency else []
        held_tokens = max(live.computed_max, known_count) if reserved else known_count
        tables = self.tables.new_tables(chain, held_tokens)
        return Placement(
            slot=-1,
            admitted_count=known_count,
            sent_count=0,
            planned_count=depth * self.block_tokens,
            computed_count=depth * self.block_tokens,
            tables=tables,
            covered_count=self.tables.reach(tables),
            residencies=chain,
            matched_count=depth,
            claims=self._claims.make(live, depth) if live.uses_cache else [],
            reserved=reserved,
            indexing=live.uses_cache,
            scoring=live.lacks_scores,
        )

    # ------------------------------------------------------------ while running

    def cover(
        self,
        live: LiveRequest,
        placement: Placement,
        stop: int,
        headroom: Callable[[], int],
        now: float,
    ) -> TableChange | None:
        """Makes the tables fit for a row of the next tokens before `stop`, see `TableRoom`."""
        unlisted = self._listing.first_unlisted(live, placement)
        return self.tables.cover(placement, stop, headroom, unlisted, now)

    def acknowledge(self, live: LiveRequest, placement: Placement, now: float) -> None:
        """Lists the blocks of the prompt that are computed by now.

        Blocks with output wait for the end: only intake knows which tokens belong to the answer.
        """
        valid_tokens = min(placement.computed_count, live.prompt_count)
        self._listing.extend(live, placement, valid_tokens, now)

    # ------------------------------------------------------------ at the end

    def release(
        self, live: LiveRequest, placement: Placement, valid_tokens: int, now: float
    ) -> None:
        """Gives the tables back; full blocks within the first `valid_tokens` stay cached."""
        self._listing.extend(live, placement, valid_tokens, now)
        self._claims.drop_all(live, placement)
        listed_count = len(placement.residencies)
        if live.uses_cache and (placement.beside or not placement.indexing):
            listed_count = self._listing.insert_around(live, placement, valid_tokens, now)
        self.tables.give_back(placement, listed_count, now)
        for residency in reversed(placement.residencies):
            self._index.unpin(residency, now)

    def discard(self, live: LiveRequest, placement: Placement, now: float) -> None:
        """Gives tables back whose contents are not to be trusted: what nobody else uses goes."""
        self._claims.drop_all(live, placement)
        self.tables.give_back(placement, len(placement.residencies), now)
        for residency in reversed(placement.residencies):
            self._index.unpin(residency, now)
            if residency.alive and residency.is_unheld_leaf:
                self._index.forget(residency)
        beside = placement.beside
        # Those above a place that is gone meanwhile may still hold what was written here; what was
        # matched was only read.
        passed = beside.chain() if beside else placement.residencies
        for residency in passed[placement.matched_count :]:
            if residency.alive:
                self._index.forget_window(residency)

    def flush(self) -> int:
        """Frees every cached block."""
        return self._index.flush(self._tree)

    # ------------------------------------------------------------ inside: matching

    def _match(self, live: LiveRequest) -> Residency | None:
        if not live.uses_cache:
            return None
        known = live.match
        earlier = known.deepest if known else None
        deepest = self._index.deepen(self._tree, earlier, live.root_key, live.token_ids)
        added_count, removed_count = self._tree.added_count, self._tree.removed_count
        begin = deepest
        if known and known.deepest is deepest and known.added_count == added_count:
            if known.removed_count == removed_count:
                return known.usable
            begin = known.usable  # Blocks have gone since, but none has come.
        usable = usable_prefix(begin, live.matchable_blocks(self.block_tokens))
        live.match = Match(deepest, usable, added_count, removed_count)
        return usable

    def _wanted_tokens(self, live: LiveRequest, reserved: bool) -> int:
        known_count = len(live.token_ids)
        if reserved:
            return max(live.computed_max, known_count)
        comes_back = live.retractions or live.failovers
        margin = self.kv.chunk_tokens if comes_back else self.block_tokens
        return known_count + min(margin, max(0, live.computed_max - known_count))

    def _cached_count(self, residency: Residency | None) -> int:
        """Blocks without a window of a chain that count as available now but not once pinned; they
        are its tail. (Those with a window are part of the cost.)"""
        count = 0
        while self.kv.whole and residency and not residency.pins:
            count += len(self.kv.whole)
            residency = residency.parent
        return count
