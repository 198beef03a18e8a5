"""Where the blocks of a request's tables come from and go to: allocated, dropped, given back.

Asked by admission for new tables, by every row for room. A table with a window is never longer than
that, a chunk and the slack (see `kv_groups`): it gives up its first blocks as it takes more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from control_plane.scheduling.live_request import BlockTable, Placement
from control_plane.scheduling.radix_index import RadixIndex
from control_plane.scheduling.residency import GroupTree, Residency


@dataclass(frozen=True, slots=True)
class TableChange:
    """What a row changes in its request's tables: (KV group, blocks dropped), (KV group, block)."""

    drops: tuple[tuple[int, int], ...] = ()
    new_blocks: tuple[tuple[int, int], ...] = ()


class TableRoom:
    """Block tables over one group's ledger; cached blocks make room when none is free."""

    def __init__(self, index: RadixIndex, tree: GroupTree) -> None:
        self._index = index
        self._tree = tree
        self._kv = tree.kv
        self._ledger = tree.ledger

    # ------------------------------------------------------------ what it takes

    def growth(self, placement: Placement) -> int:
        """Blocks that its next row of blocks takes beyond those it gives up for them."""
        count = 0
        for group, table in enumerate(placement.tables):
            kept = self._kv.first_kept(group, table.end * self._kv.block_tokens)
            count += kept <= table.dropped_count
        return count

    def lack(self, placement: Placement) -> int:
        """Blocks that its next token takes beyond those it gives up for them."""
        start = placement.planned_count
        count = sum(
            1 - self._droppable(group, placement.tables[group], start)
            for group in self._short_groups(placement, start + 1)
        )
        return max(0, count)

    def exclusive_count(self, placement: Placement) -> int:
        """Blocks that become available when this request gives its tables back."""
        held = (block_id for table in placement.tables for block_id in table.block_ids)
        return sum(map(self._ledger.returns, held))

    def reach(self, tables: Sequence[BlockTable]) -> int:
        """Tokens that the shortest of a request's tables reaches."""
        return min(table.end for table in tables) * self._kv.block_tokens

    # ------------------------------------------------------------ what changes

    def new_tables(self, chain: list[Residency], tokens_count: int) -> list[BlockTable]:
        """Tables that share a chain's blocks, with own ones for `tokens_count` tokens, or as many
        as a window, a chunk and the slack need."""
        tables: list[BlockTable] = []
        for group, window in enumerate(self._kv.windows):
            first = self._kv.first_needed(group, len(chain) * self._kv.block_tokens)
            end = self._kv.blocks_for(tokens_count)
            if window:
                end = min(end, first + self._kv.held_max(group))
            table = BlockTable(first, [link.block_of(group) for link in chain[first:]])
            self._append(group, table, end)
            tables.append(table)
        return tables

    def cover(
        self,
        placement: Placement,
        stop: int,
        headroom: Callable[[], int],
        unlisted: int | None,
        now: float,
    ) -> TableChange | None:
        """Makes the tables fit for a row of the next tokens before `stop`; None (and nothing
        changed) if blocks do not suffice. A row of prefill has them: where a table is short, it
        gives up as many as it takes.

        unlisted: the first place whose blocks may enter the index later, None if none will. Such a
        block is dropped only if blocks would not suffice for this and `headroom()` more.
        """
        start = placement.planned_count
        short = self._short_groups(placement, stop)
        tables = placement.tables
        ends = {group: self._table_end(placement, group, stop) for group in short}
        taken_count = sum(ends[group] - tables[group].end for group in short)
        drops = {group: self._droppable(group, tables[group], start) for group in short}
        available = self._ledger.available_count
        if taken_count - sum(drops.values()) > available:
            return None
        if unlisted is not None and any(drops.values()):
            gentle = {
                g: min(n, max(0, unlisted - tables[g].dropped_count)) for g, n in drops.items()
            }
            if taken_count - sum(gentle.values()) <= available - headroom():
                drops = gentle
        for group, count in drops.items():
            self._drop(tables[group], count, now)
        new_blocks: list[tuple[int, int]] = []
        for group, end in ends.items():
            taken = self._append(group, tables[group], end)
            new_blocks += [(group, block_id) for block_id in taken]
        placement.covered_count = self.reach(tables)
        return TableChange(tuple((g, n) for g, n in drops.items() if n), tuple(new_blocks))

    def give_back(self, placement: Placement, listed_count: int, now: float) -> None:
        """Empties the tables, but for whole groups' blocks of the first places: `unpin` does."""
        for group, table in enumerate(placement.tables):
            if self._kv.windows[group]:
                self._drop(table, len(table.block_ids), now)
                continue
            for block_id in table.since(listed_count):
                self._ledger.release(block_id)
        placement.tables = []

    def check_integrity(self, placement: Placement) -> None:
        """Asserts that tables, residencies and windows of a placement agree."""
        kv, chain = self._kv, placement.residencies
        assert placement.computed_count <= placement.planned_count <= placement.covered_count
        assert placement.covered_count == self.reach(placement.tables)
        for group, table in enumerate(placement.tables):
            first_needed = kv.first_needed(group, placement.planned_count)
            assert table.dropped_count <= first_needed, "what a window needs is held"
            listed = [place.block_ids[group] for place in chain[table.dropped_count : table.end]]
            assert listed == table.block_ids[: len(listed)], "what is held is listed"
            kinds = set(map(self._ledger.is_windowed, table.block_ids))
            assert kinds <= {bool(kv.windows[group])}, "blocks of its kind"

    # ------------------------------------------------------------ inside

    def _append(self, group: int, table: BlockTable, end: int) -> list[int]:
        """Lets a table reach to a place and returns the new blocks."""
        new_ids: list[int] = []
        while table.end < end:
            if not self._ledger.free_count:
                evicted_count = self._index.evict(self._tree)
                assert evicted_count, "every cached block can be evicted"
            block_id = self._ledger.allocate(windowed=bool(self._kv.windows[group]))
            table.block_ids.append(block_id)
            new_ids.append(block_id)
        return new_ids

    def _drop(self, table: BlockTable, count: int, now: float) -> None:
        for block_id in table.block_ids[:count]:
            self._index.let_go(self._tree, block_id, now)
        del table.block_ids[:count]
        table.dropped_count += count

    def _short_groups(self, placement: Placement, stop: int) -> list[int]:
        """The KV groups whose tables end before a row that ends at `stop`."""
        tables = enumerate(placement.tables)
        return [group for group, table in tables if table.end * self._kv.block_tokens < stop]

    def _droppable(self, group: int, table: BlockTable, start: int) -> int:
        return max(0, self._kv.first_kept(group, start) - table.dropped_count)

    def _table_end(self, placement: Placement, group: int, stop: int) -> int:
        """Where a short table is to end: behind the row, and with a window, as far on in what was
        known at admission as it may reach, so that it stays as long as it was admitted for."""
        row_end = self._kv.blocks_for(stop)
        if not self._kv.windows[group]:
            return row_end
        dropped_count = placement.tables[group].dropped_count
        first = max(dropped_count, self._kv.first_kept(group, placement.planned_count))
        reach = first + self._kv.held_max(group)
        assert row_end <= reach, "a row is no longer than a chunk"
        return max(row_end, min(self._kv.blocks_for(placement.admitted_count), reach))
