"""Which running request computes which prefix, so that no other computes the same at once."""

from control_plane.scheduling.live_request import LiveRequest, Placement


class PrefixClaims:
    """Hashes of blocks that running requests promise to the index of one group."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._claims: dict[int, LiveRequest] = {}

    def holds(self, live: LiveRequest, depth: int) -> bool:
        """Whether the block of its prompt at a place is promised."""
        hashes = live.hashes(self._block_tokens)
        return depth < len(hashes) and hashes[depth] in self._claims

    def make(self, live: LiveRequest, depth: int) -> list[int]:
        """Promises what nobody else does of a prompt from a place on."""
        hashes = live.hashes(self._block_tokens)
        claimed = [block_hash for block_hash in hashes[depth:] if block_hash not in self._claims]
        for block_hash in claimed:
            self._claims[block_hash] = live
        return claimed

    def keep(self, live: LiveRequest, place: int) -> None:
        """The block at a place is in the index."""
        hashes = live.hashes(self._block_tokens)
        if place < len(hashes):
            self._drop(live, hashes[place])

    def drop_all(self, live: LiveRequest, placement: Placement) -> None:
        """Whatever it promised, it keeps no promise any more."""
        for block_hash in placement.claims:
            self._drop(live, block_hash)
        placement.claims = []

    def _drop(self, live: LiveRequest, block_hash: int) -> None:
        if self._claims.get(block_hash) is live:
            del self._claims[block_hash]
