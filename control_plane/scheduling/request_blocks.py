"""The blocks of the requests of one group: match and pin at admission, grow, index, give back.

                 matched          computed                  planned
    |--- shared ---|--- own, full ---|--- own, being written ---|
    in the index    enters the index   block table grows with the rows
                    once acknowledged

A shared block is never written: a request's rows start behind what it matched.
"""

from control_plane.scheduling.live_request import LiveRequest, Placement, blocks_for
from control_plane.scheduling.radix_index import GroupTree, RadixIndex, Residency


class RequestBlocks:
    """Block tables over one group's ledger and its part of the index.

    chunk_tokens: room a retracted or replayed request needs beyond its tokens to come back.
    reserve_after: retractions after which a request takes every block it can ever need.
    """

    def __init__(
        self,
        index: RadixIndex,
        tree: GroupTree,
        *,
        prefix_cache: bool,
        chunk_tokens: int,
        reserve_after: int,
    ) -> None:
        self._index = index
        self._tree = tree
        self._ledger = tree.ledger
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._reserve_after = reserve_after
        self._claims: dict[int, LiveRequest] = {}
        self.block_tokens = tree.block_granules * index.granule_tokens

    # ------------------------------------------------------------ before admission

    def matched_tokens(self, live: LiveRequest) -> int:
        """Tokens of its resident prefix that it could use now."""
        residency = self._match(live)
        return residency.depth * self.block_tokens if residency else 0

    def is_claimed(self, live: LiveRequest) -> bool:
        """Whether its first missing block is being computed by a running request."""
        if not self._uses_cache(live):
            return False
        residency = self._match(live)
        depth = residency.depth if residency else 0
        hashes = live.hashes(self.block_tokens)
        return depth < min(self._depth_max(live), len(hashes)) and hashes[depth] in self._claims

    def admit(self, live: LiveRequest, headroom_blocks: int, now: float) -> Placement | None:
        """Matches, pins and allocates at once; None (and nothing changed) if blocks do not suffice.

        The slot of the returned placement is for the caller to fill in.
        """
        residency = self._match(live)
        depth = residency.depth if residency else 0
        known_count = len(live.token_ids)
        reserved = live.retractions >= self._reserve_after
        needed = blocks_for(self._wanted_tokens(live, reserved), self.block_tokens) - depth
        available = self._ledger.available_count - headroom_blocks
        if needed > available or needed > available - self._cached_links(residency):
            return None
        chain = self._index.pin(residency, now) if residency else []
        held_tokens = max(live.computed_max, known_count) if reserved else known_count
        own_count = blocks_for(held_tokens, self.block_tokens) - depth
        own_ids = [self._allocate() for _ in range(own_count)]
        cached_count = depth * self.block_tokens
        return Placement(
            slot=-1,
            admitted_count=known_count,
            sent_count=0,
            planned_count=cached_count,
            computed_count=cached_count,
            block_ids=[link.block_id for link in chain] + own_ids,
            residencies=chain,
            claims=self._claim(live, depth),
            reserved=reserved,
            indexing=self._uses_cache(live),
            scoring=live.lacks_scores,
        )

    # ------------------------------------------------------------ while running

    def grow(self, placement: Placement) -> int | None:
        """Appends a block to a table and returns it; None if there is none."""
        if not self._ledger.available_count:
            return None
        block_id = self._allocate()
        placement.block_ids.append(block_id)
        return block_id

    def acknowledge(self, live: LiveRequest, placement: Placement, now: float) -> None:
        """Lists the blocks of the prompt that are computed by now.

        Blocks with output wait for the end: only intake knows which tokens belong to the answer.
        """
        if placement.indexing:
            self._extend(live, placement, min(placement.computed_count, live.prompt_count), now)

    def exclusive_count(self, placement: Placement) -> int:
        """Blocks that become available when this request gives its table back."""
        return sum(self._ledger.references(block_id) == 1 for block_id in placement.block_ids)

    def release(
        self, live: LiveRequest, placement: Placement, valid_tokens: int, now: float
    ) -> None:
        """Gives a table back; its full blocks within the first `valid_tokens` stay cached."""
        if self._uses_cache(live):
            self._extend(live, placement, valid_tokens, now)
        self._drop_claims(live, placement)
        inserted = len(placement.residencies)
        if not placement.indexing and self._uses_cache(live):
            self._insert_around(live, placement, valid_tokens, now)
        else:
            for block_id in placement.block_ids[inserted:]:
                self._ledger.release(block_id)
        for residency in reversed(placement.residencies):
            self._index.unpin(residency, now)
        placement.block_ids = []

    def discard(self, live: LiveRequest, placement: Placement, now: float) -> None:
        """Gives a table back whose contents are not to be trusted: what nobody else uses goes."""
        self._drop_claims(live, placement)
        for block_id in placement.block_ids[len(placement.residencies) :]:
            self._ledger.release(block_id)
        for residency in reversed(placement.residencies):
            self._index.unpin(residency, now)
            if not residency.children_count and not self._ledger.references(residency.block_id):
                self._index.forget(residency)
        placement.block_ids = []

    def flush(self) -> int:
        """Frees every cached block."""
        return self._index.flush(self._tree)

    # ------------------------------------------------------------ inside

    def _uses_cache(self, live: LiveRequest) -> bool:
        return self._prefix_cache and live.request.use_prefix_cache

    def _depth_max(self, live: LiveRequest) -> int:
        """At least one token is computed: a full hit gives up its last block."""
        return (len(live.token_ids) - 1) // self.block_tokens

    def _match(self, live: LiveRequest) -> Residency | None:
        if not self._uses_cache(live):
            return None
        residency = self._index.deepen(self._tree, live.match, live.root_key, live.token_ids)
        live.match = residency
        while residency and residency.depth > self._depth_max(live):
            residency = residency.parent
        return residency

    def _wanted_tokens(self, live: LiveRequest, reserved: bool) -> int:
        known_count = len(live.token_ids)
        if reserved:
            return max(live.computed_max, known_count)
        comes_back = live.retractions or live.failovers
        margin = self._chunk_tokens if comes_back else self.block_tokens
        return known_count + min(margin, max(0, live.computed_max - known_count))

    def _cached_links(self, residency: Residency | None) -> int:
        """Blocks of a chain that count as available now but not once pinned; they are its tail."""
        count = 0
        while residency and not self._ledger.references(residency.block_id):
            count += 1
            residency = residency.parent
        return count

    def _allocate(self) -> int:
        if not self._ledger.free_count:
            evicted = self._index.evict(self._tree)
            assert evicted, "a cached block is always below an evictable leaf"
        return self._ledger.allocate()

    def _claim(self, live: LiveRequest, depth: int) -> list[int]:
        if not self._uses_cache(live):
            return []
        claimed = [h for h in live.hashes(self.block_tokens)[depth:] if h not in self._claims]
        for block_hash in claimed:
            self._claims[block_hash] = live
        return claimed

    def _drop_claims(self, live: LiveRequest, placement: Placement) -> None:
        for block_hash in placement.claims:
            if self._claims.get(block_hash) is live:
                del self._claims[block_hash]
        placement.claims = []

    def _extend(
        self, live: LiveRequest, placement: Placement, valid_tokens: int, now: float
    ) -> None:
        """Lists own full blocks up to the first place that another block already holds."""
        size = self.block_tokens
        residencies = placement.residencies
        while placement.indexing and (len(residencies) + 1) * size <= valid_tokens:
            place = len(residencies)
            parent = residencies[-1] if residencies else None
            residency = self._index.extend(
                self._tree,
                parent,
                live.root_key,
                live.token_ids[place * size : (place + 1) * size],
                placement.block_ids[place],
                now,
            )
            if residency.block_id != placement.block_ids[place]:
                # Going on below a block this request does not hold would break prefix closure.
                placement.indexing = False
                self._drop_claims(live, placement)
                return
            residencies.append(residency)
            if placement.claims:
                self._drop_claim_at(live, place)

    def _drop_claim_at(self, live: LiveRequest, place: int) -> None:
        hashes = live.hashes(self.block_tokens)
        if place < len(hashes) and self._claims.get(hashes[place]) is live:
            del self._claims[hashes[place]]

    def _insert_around(
        self, live: LiveRequest, placement: Placement, valid_tokens: int, now: float
    ) -> None:
        """At the end of a request no block is held any more, so duplicates can be stepped over."""
        size = self.block_tokens
        parent = placement.residencies[-1] if placement.residencies else None
        listed: list[Residency] = []
        for place in range(len(placement.residencies), len(placement.block_ids)):
            block_id = placement.block_ids[place]
            if (place + 1) * size > valid_tokens:
                self._ledger.release(block_id)
                continue
            tokens = live.token_ids[place * size : (place + 1) * size]
            parent = self._index.extend(self._tree, parent, live.root_key, tokens, block_id, now)
            if parent.block_id == block_id:
                listed.append(parent)
            else:
                self._ledger.release(block_id)
        for residency in reversed(listed):
            self._index.unpin(residency, now)
