"""The slots of a group as its workers' tables will be after the next step, and their digest."""

import heapq
import struct
import zlib
from collections.abc import Iterable

from control_plane.scheduling.live_request import LiveRequest

NO_BLOCK = 0xFFFFFFFF


def state_digest(rows: Iterable[tuple[int, int, int, int]]) -> int:
    """Checksum of (slot, length, block_count, last_block) of every KV group of occupied slots,
    ascending by slot, then by group.

    length counts the tokens whose keys and values are computed; last_block is NO_BLOCK for none.
    """
    return zlib.crc32(b"".join(struct.pack("<4I", *row) for row in rows))


class SlotTable:
    """Gives slots to requests; a slot left behind is released with the next step."""

    def __init__(self, slots_count: int) -> None:
        self._free = list(range(slots_count))
        self._released: list[int] = []
        self.occupants: dict[int, LiveRequest] = {}

    @property
    def free_count(self) -> int:
        """Slots the next step can fill (it applies its releases first)."""
        return len(self._free)

    @property
    def has_releases(self) -> bool:
        """Whether the workers have not heard of some release yet."""
        return bool(self._released)

    def occupy(self, live: LiveRequest) -> int:
        """Gives the lowest free slot to a request."""
        slot = heapq.heappop(self._free)
        self.occupants[slot] = live
        return slot

    def vacate(self, slot: int) -> None:
        """Takes a slot back."""
        del self.occupants[slot]
        heapq.heappush(self._free, slot)
        self._released.append(slot)

    def take_releases(self) -> tuple[int, ...]:
        """The releases of the next step, ascending."""
        released, self._released = sorted(self._released), []
        return tuple(released)

    def digest(self) -> int:
        """The digest the workers must have after the step just planned."""
        rows = []
        for slot in sorted(self.occupants):
            placement = self.occupants[slot].placement
            assert placement, slot
            for table in placement.tables:
                block_ids = table.block_ids
                last_block = block_ids[-1] if block_ids else NO_BLOCK
                rows.append((slot, placement.planned_count, len(block_ids), last_block))
        return state_digest(rows)
