"""A chip worker without a model: it keeps the tables and blocks of a real one and checks each step.

Each block holds the ids that were written to it. The next token is a checksum of the context as
gathered through the block table, so that a wrong block shows as a wrong token, if not before.
"""

import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

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
class FakeSlot:
    token_ids: list[int]
    output_start: int
    length: int
    block_ids: list[int]
    top_tokens: int
    prompt_top_tokens: int | None


class FakeChip:
    """Tables and blocks of one rank in one epoch."""

    def __init__(self, blocks_count: int, block_tokens: int, slots_count: int) -> None:
        self.block_tokens = block_tokens
        self.slots_count = slots_count
        self.slots: dict[int, FakeSlot] = {}
        self.blocks = [[-1] * block_tokens for _ in range(blocks_count)]
        self.step_id = 0
        self.written_blocks_count = 0

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
        for slot, block_id in plan.new_blocks:
            users = [s for s in self.slots.values() if block_id in s.block_ids]
            assert not users, f"block {block_id} is given away while in a table"
            self.slots[slot].block_ids.append(block_id)
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot computes once"
        scores = [self._score(row.slot, row.tokens_count) for row in plan.rows]
        results = [self._compute(row.slot, row.tokens_count, row.sampled) for row in plan.rows]
        if plan.digest is not None:
            assert plan.digest == self.digest(), "tables differ"
        return [x for x in results if x], [x for x in scores if x]

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots
        assert 0 <= admission.slot < self.slots_count
        held = len(admission.block_ids) * self.block_tokens
        assert held == admission.cached_count < len(admission.token_ids) or held == 0
        assert admission.prompt_top_tokens is None or not held, "what is cached has no scores"
        self.slots[admission.slot] = FakeSlot(
            list(admission.token_ids),
            admission.output_start,
            admission.cached_count,
            list(admission.block_ids),
            admission.top_tokens,
            admission.prompt_top_tokens,
        )

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
        assert end <= len(state.block_ids) * self.block_tokens, "computes beyond its blocks"
        for position in range(state.length, end):
            block_id = state.block_ids[position // self.block_tokens]
            sharers = [s for s in self.slots.values() if block_id in s.block_ids]
            assert sharers == [state], "writes a shared block"
            self.blocks[block_id][position % self.block_tokens] = state.token_ids[position]
        state.length = end
        context = self.gather(state)
        assert context == state.token_ids[:end], "the context is not the request's own"
        assert end == len(state.token_ids) or not sampled, "samples only at the last known id"
        if not sampled:
            return None
        token_id = next_token(context)
        state.token_ids.append(token_id)
        tops = (likeliest(context, state.top_tokens),) if state.top_tokens else ()
        return RowResult((token_id,), (-0.5,), tops)

    def gather(self, state: FakeSlot) -> list[int]:
        """The context of a slot as read through its block table."""
        found: list[int] = []
        for block_id in state.block_ids:
            found.extend(self.blocks[block_id])
        return found[: state.length]

    def digest(self) -> int:
        packed = b""
        for slot in sorted(self.slots):
            state = self.slots[slot]
            last = state.block_ids[-1] if state.block_ids else 0xFFFFFFFF
            packed += struct.pack("<4I", slot, state.length, len(state.block_ids), last)
        return zlib.crc32(packed)
