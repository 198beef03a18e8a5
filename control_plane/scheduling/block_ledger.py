"""The logical blocks of one group: who is free, who is cached, who is referenced."""

from control_plane.scheduling.messages import BlockCounts


class BlockLedger:
    """Counts references to the blocks 0..total-1 of one epoch of a group.

    A block is *referenced* while a request holds it, *cached* while nobody does but the prefix
    index lists it, else *free*; free + cached + referenced = total after every call. The same block
    may be given away again at once: steps run in order on the workers.

    A windowed block is one of a table that gives up a block for each it takes. So that the exchange
    never fails, each reference to it counts as a block of its own: a block is *owed* for all but
    the first, and giving one up makes one available even while others hold it.
    """

    def __init__(self, total: int) -> None:
        assert total >= 0, total
        self.total = total
        self._free_ids = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._indexed = bytearray(total)
        self._windowed = bytearray(total)
        self._cached_count = 0
        self._owed_count = 0

    @property
    def free_count(self) -> int:
        """Blocks nobody holds and the index does not list."""
        return len(self._free_ids)

    @property
    def cached_count(self) -> int:
        """Blocks nobody holds that the index lists."""
        return self._cached_count

    @property
    def available_count(self) -> int:
        """Blocks a request can get, if need be by evicting cached ones."""
        return len(self._free_ids) + self._cached_count - self._owed_count

    def counts(self) -> BlockCounts:
        """All counts in one record."""
        free, cached = self.free_count, self.cached_count
        return BlockCounts(free, cached, self.total - free - cached, self.total)

    def references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._references[block_id]

    def is_windowed(self, block_id: int) -> bool:
        """Whether the block was last given to a table with a window."""
        return bool(self._windowed[block_id])

    def returns(self, block_id: int) -> int:
        """How many blocks become available when one reference to this one is dropped: 1 or 0."""
        return 1 if self._windowed[block_id] or self._references[block_id] == 1 else 0

    def allocate(self, *, windowed: bool = False) -> int:
        """Takes a free block with one reference; the caller has made sure that there is one."""
        block_id = self._free_ids.pop()
        assert not self._references[block_id], block_id
        assert not self._indexed[block_id], block_id
        self._references[block_id] = 1
        self._windowed[block_id] = windowed
        return block_id

    def reference(self, block_id: int) -> None:
        """Adds a reference to an indexed block."""
        assert self._indexed[block_id], block_id
        if not self._references[block_id]:
            self._cached_count -= 1
        else:
            self._owed_count += self._windowed[block_id]
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drops one reference; the last one leaves the block cached if it is indexed, else free."""
        assert self._references[block_id] > 0, block_id
        self._references[block_id] -= 1
        if self._references[block_id]:
            self._owed_count -= self._windowed[block_id]
            return
        if self._indexed[block_id]:
            self._cached_count += 1
        else:
            self._free_ids.append(block_id)

    def mark_indexed(self, block_id: int) -> None:
        """The index lists a referenced block from now on."""
        assert self._references[block_id], block_id
        assert not self._indexed[block_id], block_id
        self._indexed[block_id] = 1

    def unmark_indexed(self, block_id: int) -> None:
        """The index lists a referenced block no longer."""
        assert self._references[block_id], block_id
        assert self._indexed[block_id], block_id
        self._indexed[block_id] = 0

    def evict(self, block_id: int) -> None:
        """The index lists a cached block no longer; it becomes free."""
        assert self._indexed[block_id], block_id
        assert not self._references[block_id], block_id
        self._indexed[block_id] = 0
        self._cached_count -= 1
        self._free_ids.append(block_id)

    def check_integrity(self, held_ids: list[int], indexed_ids: set[int]) -> None:
        """Asserts conservation against what requests hold (with repeats) and the index lists."""
        references = [0] * self.total
        for block_id in held_ids:
            references[block_id] += 1
        assert references == self._references, "references differ from the block tables"
        assert {i for i in range(self.total) if self._indexed[i]} == indexed_ids
        free_ids = set(self._free_ids)
        assert len(free_ids) == len(self._free_ids), "a block is free twice"
        idle_ids = {i for i in range(self.total) if not references[i]}
        assert free_ids == idle_ids - indexed_ids, "free blocks"
        assert self._cached_count == len(idle_ids & indexed_ids), "cached blocks"
        owed = [references[i] - 1 for i in range(self.total) if references[i] and self._windowed[i]]
        assert self._owed_count == sum(owed), "owed blocks"
        assert self.available_count >= 0, "what is owed can be had"
