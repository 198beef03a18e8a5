"""A chip worker without a model: it keeps the tables and blocks of a real one and checks each step.

Each place of a block holds what was written to it: its KV group and a checksum of the context up to
its token. A row reads, through each KV group's table, what the group's window shows it; the next
token follows from what it reads, so that a wrong block shows as a wrong token, if not before.
"""

import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.scheduling.messages import (
    Admission,
    PromptScores,
    RowResult,
    StepPlan,
    TopTokens,
)

VOCABULARY_SIZE = 1000


def next_token(context: Sequence[int], checksum: int = 0) -> int:
    """The token after a context; `checksum` continues an earlier `context_checksum`."""
    return context_checksum(context, checksum) % VOCABULARY_SIZE


def context_checksum(context: Sequence[int], checksum: int = 0) -> int:
    return zlib.crc32(array("I", context).tobytes(), checksum)


def token_score(context: Sequence[int]) -> float:
    """The log-probability of the last token of a context."""
    return -(context_checksum(context) % 997) / 100


def likeliest(context: Sequence[int], tops_count: int) -> TopTokens:
    """The likeliest tokens after a context."""
    first = next_token(context)
    ids = tuple((first + i) % VOCABULARY_SIZE for i in range(tops_count))
    return TopTokens(ids, tuple(-0.5 - i for i in range(tops_count)))


@dataclass
class FakeTable:
    """The blocks of one KV group, `dropped_count` before them no longer held."""

    dropped_count: int
    block_ids: list[int]


@dataclass
class FakeSlot:
    """checksums: of the context up to each computed token."""

    token_ids: list[int]
    output_start: int
    length: int
    tables: list[FakeTable]
    top_tokens: int
    prompt_top_tokens: int | None
    checksums: list[int] = field(default_factory=list)

    def compute_to(self, end: int) -> None:
        for token_id in self.token_ids[len(self.checksums) : end]:
            before = self.checksums[-1] if self.checksums else 0
            self.checksums.append(context_checksum([token_id], before))
        self.length = end


class FakeChip:
    """Tables and blocks of one rank in one epoch."""

    def __init__(
        self,
        blocks_count: int,
        block_tokens: int,
        slots_count: int,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self.block_tokens = block_tokens
        self.slots_count = slots_count
        self.windows = windows
        self.slots: dict[int, FakeSlot] = {}
        self.blocks = [[(-1, -1)] * block_tokens for _ in range(blocks_count)]
        self.step_id = 0
        self.windowed_blocks_most = 0
        """Most blocks a slot ever held in one table with a window."""

    def execute(self, plan: StepPlan) -> tuple[list[RowResult], list[PromptScores]]:
        """Applies a step as a worker does; AssertionError if it does not fit the tables."""
        assert plan.step_id == self.step_id + 1, "a gap or a repeat"
        self.step_id = plan.step_id
        for slot in plan.releases:
            del self.slots[slot]
        for admission in plan.admissions:
            self._admit(admission)
        for slot, token_ids in plan.extensions:
            self.slots[slot].token_ids.extend(token_ids)
        for slot, group, count in plan.drops:
            table = self.slots[slot].tables[group]
            assert self.windows[group], "only behind a window"
            assert 0 < count <= len(table.block_ids)
            del table.block_ids[:count]
            table.dropped_count += count
        for slot, group, block_id in plan.new_blocks:
            assert not self._holders(block_id), f"block {block_id} is given away while in a table"
            table = self.slots[slot].tables[group]
            table.block_ids.append(block_id)
            if self.windows[group]:
                self.windowed_blocks_most = max(self.windowed_blocks_most, len(table.block_ids))
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot computes once"
        scores = [self._score(row.slot, row.tokens_count) for row in plan.rows]
        results = [self._compute(row.slot, row.tokens_count, row.sampled) for row in plan.rows]
        if plan.digest is not None:
            assert plan.digest == self.digest(), "tables differ"
        return [x for x in results if x], [x for x in scores if x]

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots
        assert 0 <= admission.slot < self.slots_count
        cached_count = admission.cached_count
        assert cached_count % self.block_tokens == 0
        assert cached_count < len(admission.token_ids)
        assert admission.prompt_top_tokens is None or not cached_count, "what is cached is no score"
        assert len(admission.block_tables) == len(self.windows)
        tables: list[FakeTable] = []
        for window, block_ids in zip(self.windows, admission.block_tables, strict=True):
            dropped_count = cached_count // self.block_tokens - len(block_ids)
            assert dropped_count >= 0 if window else dropped_count == 0
            tables.append(FakeTable(dropped_count, list(block_ids)))
        state = FakeSlot(
            list(admission.token_ids),
            admission.output_start,
            cached_count,
            tables,
            admission.top_tokens,
            admission.prompt_top_tokens,
        )
        state.compute_to(cached_count)
        self.slots[admission.slot] = state

    def _score(self, slot: int, tokens_count: int) -> PromptScores | None:
        """Of the prompt tokens that follow those a row computes; None if it computes no prompt or
        nobody asked."""
        state = self.slots[slot]
        tops_count, prompt_count = state.prompt_top_tokens, state.output_start
        if tops_count is None or state.length >= prompt_count:
            return None
        end = min(state.length + tokens_count, prompt_count - 1)
        ids = state.token_ids
        places = range(state.length + 1, end + 1)
        tops = tuple(likeliest(ids[:i], tops_count) for i in places) if tops_count else ()
        return PromptScores(tuple(token_score(ids[: i + 1]) for i in places), tops)

    def _compute(self, slot: int, tokens_count: int, sampled: bool) -> RowResult | None:
        state = self.slots[slot]
        end = state.length + tokens_count
        assert tokens_count > 0
        assert end <= len(state.token_ids), "computes ids it does not have"
        start = state.length
        state.compute_to(end)
        read = [self._write_and_read(state, group, start) for group in range(len(self.windows))]
        assert end == len(state.token_ids) or not sampled, "samples only at the last known id"
        if not sampled:
            return None
        context = state.token_ids[:end]
        token_id = read[-1] % VOCABULARY_SIZE
        state.token_ids.append(token_id)
        tops = (likeliest(context, state.top_tokens),) if state.top_tokens else ()
        return RowResult((token_id,), (-0.5,), tops)

    def _write_and_read(self, state: FakeSlot, group: int, start: int) -> int:
        """Writes a row from `start` on through one table, reads back all that it sees through the
        same, and returns the last of it."""
        size, end, table = self.block_tokens, state.length, state.tables[group]
        window = self.windows[group]
        first_seen = max(0, start - window + 1) if window else 0
        blocks = dict(enumerate(table.block_ids, table.dropped_count))
        assert first_seen // size >= table.dropped_count, "needs a block that was dropped"
        assert (end - 1) // size in blocks, "computes beyond its blocks"
        for place in range(start // size, (end - 1) // size + 1):
            assert self._holders(blocks[place]) == [(state, group)], "writes a shared block"
        for position in range(start, end):
            block = self.blocks[blocks[position // size]]
            block[position % size] = (group, state.checksums[position])
        seen: list[tuple[int, int]] = []
        for place in range(first_seen // size, (end - 1) // size + 1):
            seen += self.blocks[blocks[place]]
        seen = seen[first_seen % size : first_seen % size + end - first_seen]
        assert [checksum for _, checksum in seen] == state.checksums[first_seen:end], "not its own"
        assert {written for written, _ in seen} == {group}, "written by another KV group"
        return seen[-1][1]

    def _holders(self, block_id: int) -> list[tuple[FakeSlot, int]]:
        """Slots and KV groups whose tables have a block."""
        return [
            (state, group)
            for state in self.slots.values()
            for group, table in enumerate(state.tables)
            if block_id in table.block_ids
        ]

    def digest(self) -> int:
        packed = b""
        for slot in sorted(self.slots):
            state = self.slots[slot]
            for table in state.tables:
                last = table.block_ids[-1] if table.block_ids else 0xFFFFFFFF
                packed += struct.pack("<4I", slot, state.length, len(table.block_ids), last)
        return zlib.crc32(packed)
