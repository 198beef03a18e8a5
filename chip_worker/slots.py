"""Slot tables: what a worker remembers of each request, changed only by steps and drawn tokens.

    tokens   [ cached | computed ...... | known, not computed ]      ids, prompt and output
             0                       length                known
    tables   [ b0 ][ b1 ][ b2 ] ...   of each KV group: logical blocks that hold the first `length`
                                      tokens and more, less what lies behind the group's window

The tables follow the control plane exactly: every change is checked, and one that does not fit
raises DivergedError. After that the epoch is over, so nothing is undone.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chip_worker.batch import Admission, RowWants, SlotSampling, Step, StepRow
from chip_worker.block_tables import BlockPool, BlockTable, BlockTableChanges
from chip_worker.errors import DivergedError


@dataclass(slots=True)
class Slot:
    """A request in the tables; `tokens` is as long as the context, `known` of them are set."""

    tokens: npt.NDArray[np.int64]
    known: int
    output_start: int
    length: int
    tables: list[BlockTable]
    sampling: SlotSampling
    wants: RowWants


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row of a step once applied: the slot computes its tokens `start` .. `stop` - 1."""

    slot_index: int
    slot: Slot
    start: int
    stop: int
    sampled: bool

    @property
    def scored(self) -> range | None:
        """Indices of the prompt tokens it scores, maybe none; None if it has no part in scoring.

        The logits at one token score the next, up to the prompt's last.
        """
        prompt_count = self.slot.output_start
        if self.slot.wants.prompt_top_tokens is None or self.start >= prompt_count:
            return None
        return range(self.start + 1, min(self.stop, prompt_count - 1) + 1)


class SlotTables:
    """All slots of one epoch; `end` ends it.

    context_tokens: most tokens whose KV a slot may hold; row_tokens_max: most tokens of all rows of
    a step; pool: its references follow the slots; kv_windows: of each KV group, 0 for none.
    """

    def __init__(
        self,
        slots_count: int,
        context_tokens: int,
        block_tokens: int,
        pool: BlockPool,
        row_tokens_max: int,
        kv_windows: Sequence[int] = (0,),
    ) -> None:
        self._context_tokens = context_tokens
        self._blocks = BlockTableChanges(block_tokens, kv_windows, pool)
        self._pool = pool
        self._row_tokens_max = row_tokens_max
        self._slots: list[Slot | None] = [None] * slots_count
        # One more than the context: the token drawn at its very end is known but never computed.
        self._tokens = np.zeros((slots_count, context_tokens + 1), dtype=np.int64)

    def apply(self, step: Step) -> list[PlannedRow]:
        """Applies releases, admissions, extensions, drops, blocks and rows, in this order.

        Lengths count the step's tokens from here on. Raises DivergedError at the first change that
        does not fit, and if the digest after the step is not the step's.
        """
        for slot_index in step.releases:
            self._blocks.release(self._occupied(slot_index, "release").tables)
            self._slots[slot_index] = None
        for admission in step.admissions:
            self._admit(admission)
        for slot_index, token_ids in step.extensions:
            self._extend(slot_index, token_ids)
        for slot_index, kv_group, count in step.drops:
            slot = self._occupied(slot_index, "drop")
            self._blocks.drop(slot_index, slot.tables, kv_group, count, slot.length)
        for slot_index, kv_group, block_id in step.new_blocks:
            slot = self._occupied(slot_index, "new block")
            self._blocks.append(slot_index, slot.tables, kv_group, block_id)
        rows = self._plan_rows(step.rows)
        if step.digest is not None:
            digest = self.digest()
            if digest != step.digest:
                raise DivergedError(
                    f"state digest is {digest:#010x}, the step says {step.digest:#010x}"
                )
        return rows

    def record(self, slot: Slot, token_id: int) -> None:
        """Appends a drawn token to what is known."""
        slot.tokens[slot.known] = token_id
        slot.known += 1

    def occupied(self) -> list[int]:
        """Indices of the slots that hold a request, ascending."""
        return [index for index, slot in enumerate(self._slots) if slot is not None]

    def end(self) -> None:
        """Called once, last: no slot holds a block any more, and the pool must know of no other."""
        for slot in self._slots:
            if slot is not None:
                self._blocks.release(slot.tables)
        left_count = self._pool.referenced_count
        assert not left_count, f"{left_count} KV blocks are held by no slot, but not released"

    def digest(self) -> int:
        """CRC-32 over (slot, length, blocks, last block): slots, then KV groups, ascending."""
        quadruples = [
            (index, slot.length, len(table.block_ids), table.last_block)
            for index, slot in enumerate(self._slots)
            if slot is not None
            for table in slot.tables
        ]
        return zlib.crc32(np.array(quadruples, dtype="<u4").tobytes())

    def _occupied(self, slot_index: int, what: str) -> Slot:
        slot = self._slots[slot_index] if 0 <= slot_index < len(self._slots) else None
        if slot is None:
            raise DivergedError(f"{what} for slot {slot_index}, which holds no request")
        return slot

    def _admit(self, admission: Admission) -> None:
        index = admission.slot
        if not 0 <= index < len(self._slots):
            raise DivergedError(f"admission to slot {index} of {len(self._slots)}")
        if self._slots[index] is not None:
            raise DivergedError(f"admission to slot {index}, which holds a request")
        self._slots[index] = Slot(
            tokens=self._tokens[index],
            known=0,
            output_start=admission.output_start,
            length=admission.cached_count,
            tables=self._blocks.admit(index, admission.cached_count, admission.block_tables),
            sampling=admission.sampling,
            wants=admission.wants,
        )
        self._extend(index, admission.token_ids)

    def _extend(self, slot_index: int, token_ids: tuple[int, ...]) -> None:
        slot = self._occupied(slot_index, "extension")
        known = slot.known + len(token_ids)
        if known > self._context_tokens:
            raise DivergedError(
                f"slot {slot_index} would know {known} tokens; the context has "
                f"{self._context_tokens}"
            )
        slot.tokens[slot.known : known] = token_ids
        slot.known = known

    def _plan_rows(self, rows: tuple[StepRow, ...]) -> list[PlannedRow]:
        planned = [self._plan_row(row) for row in rows]
        if len({row.slot_index for row in planned}) != len(planned):
            raise DivergedError("a slot stands in two rows of a step")
        tokens_count = sum(row.stop - row.start for row in planned)
        if tokens_count > self._row_tokens_max:
            raise DivergedError(
                f"a step of {tokens_count} tokens; chunk and slots allow {self._row_tokens_max}"
            )
        return planned

    def _plan_row(self, row: StepRow) -> PlannedRow:
        slot = self._occupied(row.slot, "row")
        start, stop = slot.length, slot.length + row.tokens_count
        if row.tokens_count < 1 or stop > slot.known or stop > self._context_tokens:
            raise DivergedError(
                f"slot {row.slot} is to compute tokens {start} to {stop}; it knows {slot.known} "
                f"and the context has {self._context_tokens}"
            )
        if row.sampled and stop != slot.known:
            raise DivergedError(
                f"slot {row.slot} is to draw after token {stop}, but knows {slot.known}"
            )
        self._blocks.check_row(row.slot, slot.tables, start, stop)
        planned = PlannedRow(row.slot, slot, start, stop, row.sampled)
        if planned.scored and planned.scored[-1] >= slot.known:
            raise DivergedError(
                f"slot {row.slot} is to score token {planned.scored[-1]}, but knows {slot.known}"
            )
        slot.length = stop
        return planned
