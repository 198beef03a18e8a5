"""How a request's blocks enter the prefix index: as they are computed, and at its end.

                  residencies                    beside
    |--- matched ---|--- listed by it ---|--- another's, passed ---|--- own, not listed ---|

Where another request's blocks stand already, this one goes on beside them, for going on below a
place it does not hold would break prefix closure. With windows it adds what is missing there, so
that a prefix whose window blocks are gone becomes usable again when someone computes it.
"""

from control_plane.scheduling.live_request import LiveRequest, Placement
from control_plane.scheduling.prefix_claims import PrefixClaims
from control_plane.scheduling.radix_index import RadixIndex
from control_plane.scheduling.residency import GroupTree, Residency


class PrefixListing:
    """Lists the blocks of one group's requests and keeps what they claimed."""

    def __init__(self, index: RadixIndex, tree: GroupTree, claims: PrefixClaims) -> None:
        self._index = index
        self._tree = tree
        self._kv = tree.kv
        self._claims = claims

    def first_unlisted(self, live: LiveRequest, placement: Placement) -> int | None:
        """The next place whose blocks may enter the index while it runs; None if none will."""
        if not placement.indexing:
            return None
        passed = self._passed_places(placement)
        return passed if passed < live.prompt_count // self._kv.block_tokens else None

    def extend(
        self, live: LiveRequest, placement: Placement, valid_tokens: int, now: float
    ) -> None:
        """Lists own full blocks up to the first place where another's are; there and beyond, only
        what with a window is missing."""
        while placement.indexing:
            place = self._passed_places(placement)
            if (place + 1) * self._kv.block_tokens > valid_tokens:
                return
            if not self._list_place(live, placement, place, now):
                placement.indexing = False
                self._claims.drop_all(live, placement)
            elif placement.claims:
                self._claims.keep(live, place)

    def insert_around(
        self, live: LiveRequest, placement: Placement, valid_tokens: int, now: float
    ) -> int:
        """At the end of a request no block is held any more, so duplicates can be stepped over.

        Lists everything before the place returned.
        """
        size = self._kv.block_tokens
        parent = placement.residencies[-1] if placement.residencies else None
        listed: list[Residency] = []
        end = max(len(placement.residencies), valid_tokens // size)
        for place in range(len(placement.residencies), end):
            tokens = live.token_ids[place * size : (place + 1) * size]
            block_ids = placement.blocks_at(place)
            there = self._index.below(self._tree, parent, live.root_key, tokens)
            if there:
                self._index.heal(there, block_ids)
                for group in self._kv.whole:
                    block_id = block_ids[group]
                    assert block_id is not None, place
                    self._tree.ledger.release(block_id)
            else:
                there = self._index.extend(
                    self._tree, parent, live.root_key, tokens, block_ids, now
                )
                listed.append(there)
            parent = there
        for residency in reversed(listed):
            self._index.unpin(residency, now)
        return end

    def _passed_places(self, placement: Placement) -> int:
        """Places up to which its blocks are in the index, or another's instead."""
        return placement.beside.depth if placement.beside else len(placement.residencies)

    def _list_place(self, live: LiveRequest, placement: Placement, place: int, now: float) -> bool:
        """Lists what is missing at a place; False if there, or below, nothing can be listed yet."""
        chain = placement.residencies
        parent = placement.beside or (chain[-1] if chain else None)
        if placement.beside and not placement.beside.alive:
            return False
        tokens = live.token_ids[place * self._kv.block_tokens : (place + 1) * self._kv.block_tokens]
        there = self._index.below(self._tree, parent, live.root_key, tokens)
        block_ids = placement.blocks_at(place)
        if there is None:
            if placement.beside:
                return False
            chain.append(
                self._index.extend(self._tree, parent, live.root_key, tokens, block_ids, now)
            )
            return True
        if not self._kv.windowed:
            return False
        placement.beside = there
        self._index.heal(there, block_ids)
        return True
