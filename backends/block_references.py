"""Which blocks of a pool somebody holds, how often, and whose contents may still be wanted.

    idle  --retain-->  referenced  --last release-->  kept  --discard-->  idle
      └──allocate──▶  referenced  ──last release──▶  idle

The control plane's block ledger decides which block a request gets, and alone knows which released
ones it caches: what is counted here is what this process holds of that. It shows two slots that
write one block, and what an epoch leaves behind.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backends.errors import OutOfMemory


class BlockReferences:
    """Counts of `capacity` blocks, of which at most `quota` are referenced at once.

    A block id outside the capacity and a release too many are broken invariants and assert.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.quota = capacity
        self._counts = [0] * capacity
        self._kept: npt.NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)
        self._allocated: set[int] = set()
        self._referenced_count = 0

    @property
    def referenced_count(self) -> int:
        """Blocks with a reference."""
        return self._referenced_count

    @property
    def free_count(self) -> int:
        """Blocks that `allocate` can give."""
        idle_count = self.capacity - int(np.count_nonzero(self._kept))
        return max(0, min(idle_count, self.quota - self._referenced_count))

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """[capacity] bool, not to be changed: referenced, or with contents that may be wanted."""
        return self._kept

    def references(self, block: int) -> int:
        """How many times a block is retained."""
        self._check(block)
        return self._counts[block]

    def retain(self, blocks: Sequence[int]) -> None:
        """One more reference of each. Raises OutOfMemory beyond the quota, nothing changed."""
        for block in blocks:
            self._check(block)
        fresh = {block for block in blocks if not self._counts[block]}
        if self._referenced_count + len(fresh) > self.quota:
            raise self._out_of_memory(len(fresh))
        for block in blocks:
            self._counts[block] += 1
            self._allocated.discard(block)
        self._referenced_count += len(fresh)
        self.keep(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less of each; the contents stay, as the ledger may cache them."""
        for block in blocks:
            self._check(block)
            assert self._counts[block], f"block {block} is released, but nobody holds it"
            self._counts[block] -= 1
            if self._counts[block]:
                continue
            self._referenced_count -= 1
            if block in self._allocated:
                self._allocated.remove(block)
                self._kept[block] = False

    def allocate(self, count: int) -> list[int]:
        """`count` idle blocks, lowest first, with one reference each. Raises OutOfMemory.

        For work of this process' own, such as a warm-up: once released they are idle again.
        """
        assert count >= 0, f"{count} blocks asked"
        if count > self.free_count:
            raise self._out_of_memory(count)
        blocks: list[int] = np.flatnonzero(~self._kept)[:count].tolist()
        self.retain(blocks)
        self._allocated.update(blocks)
        return blocks

    def keep(self, blocks: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """The contents may be wanted from here on."""
        self._kept[np.asarray(blocks, dtype=np.int64)] = True

    def discard(self, blocks: Sequence[int]) -> None:
        """Nobody wants the contents any more; said by whoever owns the ledger."""
        for block in blocks:
            self._check(block)
            assert not self._counts[block], f"block {block} is discarded, but somebody holds it"
            self._kept[block] = False

    def _check(self, block: int) -> None:
        assert 0 <= block < self.capacity, f"block {block} of {self.capacity}"

    def _out_of_memory(self, count: int) -> OutOfMemory:
        kept_count = int(np.count_nonzero(self._kept))
        return OutOfMemory(
            f"{count} KV blocks asked; of {self.capacity} blocks with a quota of {self.quota}, "
            f"{self._referenced_count} are referenced and {kept_count - self._referenced_count} "
            "kept with contents: release or discard blocks, or set --kv-blocks higher"
        )
