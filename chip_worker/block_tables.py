"""The block tables of a slot, one for each KV group, and the checks of every change to them.

KV group without a window    [ b0 ][ b1 ][ b2 ][ b3 ]
KV group with a window       dropped     [ b7 ][ b4 ]    `start`: first token of b7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chip_worker.errors import DivergedError

NO_BLOCK = 0xFFFFFFFF


class BlockPool(Protocol):
    """What the tables need of the KV pool: to say which blocks their slots hold."""

    @property
    def capacity(self) -> int:
        """Blocks are 0 .. capacity - 1."""

    @property
    def referenced_count(self) -> int:
        """Blocks with a reference."""

    def references(self, block: int) -> int:
        """How many slots hold a block."""

    def retain(self, blocks: Sequence[int]) -> None:
        """A slot holds these blocks."""

    def release(self, blocks: Sequence[int]) -> None:
        """It holds them no more."""


@dataclass(slots=True)
class BlockTable:
    """The blocks a slot holds in one KV group; `start`: position of the first token in them."""

    block_ids: list[int]
    start: int = 0

    @property
    def last_block(self) -> int:
        """The last block held, or NO_BLOCK."""
        return self.block_ids[-1] if self.block_ids else NO_BLOCK


class BlockTableChanges:
    """Changes tables of slots as steps say; the pool's references follow.

    windows: of each KV group the tokens a token sees, itself included; 0 for all. Every method
    that changes or checks a table raises DivergedError naming slot and KV group.
    """

    def __init__(self, block_tokens: int, windows: Sequence[int], pool: BlockPool) -> None:
        self._block_tokens = block_tokens
        self._windows = tuple(windows)
        self._pool = pool

    def admit(
        self, slot_index: int, cached_count: int, block_tables: Sequence[Sequence[int]]
    ) -> list[BlockTable]:
        """The tables of a new slot whose first `cached_count` tokens are in these blocks.

        The table of a KV group with a window ends with the last block of those tokens.
        """
        if len(block_tables) != len(self._windows):
            raise DivergedError(
                f"admission to slot {slot_index} with {len(block_tables)} block tables; the model "
                f"has {len(self._windows)} KV groups"
            )
        tables = [
            self._admitted(slot_index, kv_group, cached_count, list(block_ids))
            for kv_group, block_ids in enumerate(block_tables)
        ]
        for table in tables:
            self._pool.retain(table.block_ids)
        return tables

    def _admitted(
        self, slot_index: int, kv_group: int, cached_count: int, block_ids: list[int]
    ) -> BlockTable:
        window = self._windows[kv_group]
        cached_blocks = -(-cached_count // self._block_tokens)
        dropped = cached_blocks - len(block_ids) if window else 0
        needed = self._first_block_needed(kv_group, cached_count)
        if (
            cached_count < 0
            or not 0 <= dropped <= needed
            or len(block_ids) < cached_blocks - dropped
        ):
            raise DivergedError(
                f"admission to slot {slot_index}: {cached_count} cached tokens in {len(block_ids)} "
                f"blocks of {self._block_tokens} of KV group {kv_group}"
                + (f", whose window of {window} needs {cached_blocks - needed}" if window else "")
            )
        for block_id in block_ids:
            self._check_block(slot_index, kv_group, block_id)
        return BlockTable(block_ids, dropped * self._block_tokens)

    def drop(
        self, slot_index: int, tables: Sequence[BlockTable], kv_group: int, count: int, length: int
    ) -> None:
        """Takes blocks off the front that no token from position `length` on sees."""
        table = self._table(slot_index, tables, kv_group, "a drop")
        where = f"slot {slot_index}, KV group {kv_group}, is to drop {count} blocks"
        if not 0 < count <= len(table.block_ids):
            raise DivergedError(f"{where}; it holds {len(table.block_ids)}")
        start = table.start + count * self._block_tokens
        needed = self._first_block_needed(kv_group, length) * self._block_tokens
        if start > needed:
            window = self._windows[kv_group]
            seen = f"sees {window} tokens" if window else "sees all"
            raise DivergedError(
                f"{where} of {self._block_tokens} tokens and keep those from token {start} on; "
                f"token {length} {seen} and needs the block of token {needed}"
            )
        self._pool.release(table.block_ids[:count])
        del table.block_ids[:count]
        table.start = start

    def append(
        self, slot_index: int, tables: Sequence[BlockTable], kv_group: int, block_id: int
    ) -> None:
        """One more block at the end."""
        table = self._table(slot_index, tables, kv_group, "a block")
        self._check_block(slot_index, kv_group, block_id)
        self._pool.retain((block_id,))
        table.block_ids.append(block_id)

    def check_row(
        self, slot_index: int, tables: Sequence[BlockTable], start: int, stop: int
    ) -> None:
        """Tokens `start` .. `stop` - 1 fit every table, into blocks that are the slot's alone."""
        for kv_group, table in enumerate(tables):
            if stop > table.start + len(table.block_ids) * self._block_tokens:
                raise DivergedError(
                    f"slot {slot_index}, KV group {kv_group}, is to hold tokens {table.start} to "
                    f"{stop} in {len(table.block_ids)} blocks of {self._block_tokens}"
                )
            first = (start - table.start) // self._block_tokens
            last = (stop - 1 - table.start) // self._block_tokens
            for block_id in table.block_ids[first : last + 1]:
                holders_count = self._pool.references(block_id)
                if holders_count != 1:
                    raise DivergedError(
                        f"slot {slot_index}, KV group {kv_group}, is to write block {block_id}, "
                        f"which is held {holders_count} times"
                    )

    def release(self, tables: Sequence[BlockTable]) -> None:
        """The slot that held these blocks is empty."""
        for table in tables:
            self._pool.release(table.block_ids)

    def _first_block_needed(self, kv_group: int, length: int) -> int:
        """Place in the whole table of the first block that token `length` sees.

        The control plane plans by the same arithmetic. It is written a second time on purpose:
        this checks the other side, which a shared function could not.
        """
        window = self._windows[kv_group]
        return max(0, length - window + 1) // self._block_tokens if window else 0

    def _table(
        self, slot_index: int, tables: Sequence[BlockTable], kv_group: int, what: str
    ) -> BlockTable:
        if not 0 <= kv_group < len(tables):
            raise DivergedError(
                f"{what} for KV group {kv_group} of slot {slot_index}; the model has {len(tables)}"
            )
        return tables[kv_group]

    def _check_block(self, slot_index: int, kv_group: int, block_id: int) -> None:
        if not 0 <= block_id < self._pool.capacity:
            raise DivergedError(
                f"slot {slot_index}, KV group {kv_group}, is given block {block_id}; there are "
                f"{self._pool.capacity}"
            )
