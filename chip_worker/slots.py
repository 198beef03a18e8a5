"""Slot tables: what a worker remembers of each request, changed only by steps and drawn tokens.

    tokens   [ cached | computed ...... | known, not computed ]      ids, prompt and output
             0                       length                known
    blocks   [ b0 ][ b1 ][ b2 ] ...   logical blocks that hold the first `length` tokens and more

The tables follow the control plane exactly: every change is checked, and one that does not fit
raises DivergedError. After that the epoch is over, so nothing is undone.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chip_worker.batch import Admission, RowWants, SlotSampling, Step, StepRow
from chip_worker.errors import DivergedError

_NO_BLOCK = 0xFFFFFFFF


@dataclass(slots=True)
class Slot:
    """A request in the tables; `tokens` is as long as the context, `known` of them are set."""

    tokens: npt.NDArray[np.int64]
    known: int
    output_start: int
    length: int
    block_ids: list[int]
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


class SlotTables:
    """All slots of one epoch; `end` ends it.

    context_tokens: most tokens whose KV a slot may hold; row_tokens_max: most tokens of all rows of
    a step; pool: its references follow the slots.
    """

    def __init__(
        self,
        slots_count: int,
        context_tokens: int,
        block_tokens: int,
        pool: BlockPool,
        row_tokens_max: int,
    ) -> None:
        self._context_tokens = context_tokens
        self._block_tokens = block_tokens
        self._pool = pool
        self._row_tokens_max = row_tokens_max
        self._slots: list[Slot | None] = [None] * slots_count
        # One more than the context: the token drawn at its very end is known but never computed.
        self._tokens = np.zeros((slots_count, context_tokens + 1), dtype=np.int64)

    def apply(self, step: Step) -> list[PlannedRow]:
        """Applies releases, admissions, extensions, blocks and rows, in this order.

        Lengths count the step's tokens from here on. Raises DivergedError at the first change that
        does not fit, and if the digest after the step is not the step's.
        """
        for slot_index in step.releases:
            self._pool.release(self._occupied(slot_index, "release").block_ids)
            self._slots[slot_index] = None
        for admission in step.admissions:
            self._admit(admission)
        for slot_index, token_ids in step.extensions:
            self._extend(slot_index, token_ids)
        for slot_index, block_id in step.new_blocks:
            slot = self._occupied(slot_index, "new block")
            self._check_block(slot_index, block_id)
            self._pool.retain((block_id,))
            slot.block_ids.append(block_id)
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
                self._pool.release(slot.block_ids)
        left_count = self._pool.referenced_count
        assert not left_count, f"{left_count} KV blocks are held by no slot, but not released"

    def digest(self) -> int:
        """CRC-32 over (slot, length, blocks, last block) of every occupied slot, ascending."""
        quadruples = [
            (
                index,
                slot.length,
                len(slot.block_ids),
                slot.block_ids[-1] if slot.block_ids else _NO_BLOCK,
            )
            for index, slot in enumerate(self._slots)
            if slot is not None
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
        cached = admission.cached_count
        if not 0 <= cached <= len(admission.block_ids) * self._block_tokens:
            raise DivergedError(
                f"admission to slot {index}: {cached} cached tokens in "
                f"{len(admission.block_ids)} blocks of {self._block_tokens}"
            )
        for block_id in admission.block_ids:
            self._check_block(index, block_id)
        self._pool.retain(admission.block_ids)
        self._slots[index] = Slot(
            tokens=self._tokens[index],
            known=0,
            output_start=admission.output_start,
            length=cached,
            block_ids=list(admission.block_ids),
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

    def _check_block(self, slot_index: int, block_id: int) -> None:
        if not 0 <= block_id < self._pool.capacity:
            raise DivergedError(
                f"slot {slot_index} is given block {block_id}; there are {self._pool.capacity}"
            )

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
        if stop > len(slot.block_ids) * self._block_tokens:
            raise DivergedError(
                f"slot {row.slot} is to hold {stop} tokens in {len(slot.block_ids)} blocks of "
                f"{self._block_tokens}"
            )
        self._check_unshared(row.slot, slot, start, stop)
        planned = PlannedRow(row.slot, slot, start, stop, row.sampled)
        if planned.scored and planned.scored[-1] >= slot.known:
            raise DivergedError(
                f"slot {row.slot} is to score token {planned.scored[-1]}, but knows {slot.known}"
            )
        slot.length = stop
        return planned

    def _check_unshared(self, slot_index: int, slot: Slot, start: int, stop: int) -> None:
        """The blocks that tokens `start` .. `stop` - 1 are written to must be the slot's alone."""
        first, last = start // self._block_tokens, (stop - 1) // self._block_tokens
        for block_id in slot.block_ids[first : last + 1]:
            holders_count = self._pool.references(block_id)
            if holders_count != 1:
                raise DivergedError(
                    f"slot {slot_index} is to write block {block_id}, which is held "
                    f"{holders_count} times"
                )
