"""Block tables of several KV groups follow random steps as a plain model of them says."""

import copy
import random
import struct
import zlib
from dataclasses import dataclass, field, replace

import pytest

from backends.block_references import BlockReferences
from chip_worker.batch import Admission, SlotSampling, Step, StepRow
from chip_worker.errors import DivergedError
from chip_worker.slots import SlotTables
from chip_worker.step_batch import build_batch

BLOCK, CONTEXT, SLOTS, CAPACITY = 4, 60, 4, 400
WINDOWS = {"one": (0,), "mixed": (0, 7, 7, 16), "windows only": (1, 4, 9)}
SEEDS = range(15)


@dataclass
class PlainSlot:
    """Of each KV group: which block holds the tokens from `place` * BLOCK on."""

    length: int
    known: int
    held: list[dict[int, int]]
    next_place: list[int] = field(default_factory=list)


class PlainTables:
    """Plans random steps that are right, and knows what the tables look like after each."""

    def __init__(self, windows, seed):
        self.random = random.Random(seed)
        self.windows = windows
        self.slots = {}
        self._fresh = list(range(CAPACITY))
        self.random.shuffle(self._fresh)

    def first_needed(self, kv_group, length):
        """The first block that the token at this position sees."""
        window = self.windows[kv_group]
        seen_from = 0 if window == 0 else max(0, length + 1 - window)
        return seen_from // BLOCK

    def holders(self):
        every = [
            block for slot in self.slots.values() for held in slot.held for block in held.values()
        ]
        return {block: every.count(block) for block in every}

    def digest(self):
        packed = b""
        for index in sorted(self.slots):
            slot = self.slots[index]
            for held in slot.held:
                last = held[max(held)] if held else 0xFFFFFFFF
                packed += struct.pack("<4I", index, slot.length, len(held), last)
        return zlib.crc32(packed)

    def step(self):
        """A random step, its digest included."""
        releases = [index for index in self.slots if self.random.random() < 0.05]
        for index in releases:
            del self.slots[index]
        admissions = tuple(
            self._admit(index)
            for index in range(SLOTS)
            if index not in self.slots and self.random.random() < 0.6
        )
        extensions, drops, new_blocks, rows = [], [], [], []
        for index, slot in self.slots.items():
            if slot.known < CONTEXT:
                count = self.random.randint(1, min(9, CONTEXT - slot.known))
                slot.known += count
                extensions.append((index, tuple(range(count))))
            tokens = self.random.randint(0, min(11, slot.known - slot.length))
            drops += self._drop(index, slot)
            new_blocks += self._append(index, slot, slot.length + tokens)
            if tokens:
                rows.append(StepRow(index, tokens, False))
                slot.length += tokens
        return Step(
            1,
            1,
            1,
            releases=tuple(releases),
            admissions=admissions,
            extensions=tuple(extensions),
            drops=tuple(drops),
            new_blocks=tuple(new_blocks),
            rows=tuple(rows),
            digest=self.digest(),
        )

    def _admit(self, index):
        """Maybe with a prefix that is another slot's too, less its last block."""
        blocks = 0
        donor = self.slots[self.random.choice(list(self.slots))] if self.slots else None
        if donor is not None:
            blocks = self.random.randint(0, donor.length // BLOCK)
            needs = [self.first_needed(each, blocks * BLOCK) for each in range(len(self.windows))]
            if any(
                place not in held
                for held, first in zip(donor.held, needs, strict=True)
                for place in range(first, blocks)
            ):
                blocks = 0
        held = []
        for kv_group, window in enumerate(self.windows):
            first = 0
            if blocks and window:
                # As many as are needed or more, as far as there are.
                first = self.first_needed(kv_group, blocks * BLOCK)
                while first - 1 in donor.held[kv_group] and self.random.random() < 0.5:
                    first -= 1
            held.append({place: donor.held[kv_group][place] for place in range(first, blocks)})
        self.slots[index] = PlainSlot(blocks * BLOCK, blocks * BLOCK, held, [blocks] * len(held))
        tables = tuple(tuple(table[place] for place in sorted(table)) for table in held)
        ids = tuple(range(blocks * BLOCK))
        return Admission(index, ids, len(ids), len(ids), tables, SlotSampling(0.0, 1))

    def _drop(self, index, slot):
        for kv_group, held in enumerate(slot.held):
            first = min(held, default=0)
            most = min(len(held), self.first_needed(kv_group, slot.length) - first)
            count = self.random.randint(0, max(0, most))
            if count:
                for place in range(first, first + count):
                    del held[place]
                yield index, kv_group, count

    def _append(self, index, slot, stop):
        used = self.holders()
        for kv_group, held in enumerate(slot.held):
            more = self.random.randint(0, 1)
            while slot.next_place[kv_group] < -(-stop // BLOCK) + more:
                block = held[slot.next_place[kv_group]] = self._take(used)
                slot.next_place[kv_group] += 1
                yield index, kv_group, block

    def _take(self, used):
        """A block that nobody holds now."""
        while (block := self._fresh.pop(0)) in used:
            self._fresh.append(block)
        self._fresh.append(block)
        used[block] = 1
        return block


def slot_tables(windows):
    pool = BlockReferences(CAPACITY)
    return SlotTables(SLOTS, CONTEXT, BLOCK, pool, 50, windows), pool


def check_rows(plain, planned):
    """Every token a row sees or writes is where the plain tables have it."""
    if not planned:
        return
    batch = build_batch(planned)
    assert len(batch.rows) == len(plain.windows)
    for kv_group, rows in enumerate(batch.rows):
        for row, each in enumerate(planned):
            held = plain.slots[each.slot_index].held[kv_group]
            start, table = rows.table_starts[row], rows.block_tables[row]
            assert rows.context_starts[row] == each.start
            assert start <= max(0, each.start + 1 - (plain.windows[kv_group] or CONTEXT))
            assert {start // BLOCK + place: block for place, block in enumerate(table)} == held
            assert max(held) >= (each.stop - 1) // BLOCK


@pytest.mark.parametrize("name", WINDOWS)
def test_random_steps_leave_the_tables_that_a_plain_model_has(name):
    dropped = shared = 0
    for seed in SEEDS:
        plain = PlainTables(WINDOWS[name], seed)
        tables, pool = slot_tables(plain.windows)
        for _ in range(25):
            step = plain.step()
            check_rows(plain, tables.apply(step))
            holders = plain.holders()
            assert pool.referenced_count == len(holders)
            assert all(pool.references(block) == count for block, count in holders.items())
            dropped += len(step.drops)
            shared += max(holders.values(), default=0) > 1
        tables.end()
    assert shared
    assert bool(dropped) == (name != "one"), "the seeds try too little"


def one_drop_more(plain):
    """Of the first block that a token still sees."""
    for index, slot in plain.slots.items():
        for kv_group, held in enumerate(slot.held):
            count = plain.first_needed(kv_group, slot.length) - min(held, default=0) + 1
            if 0 < count <= len(held):
                yield (index, kv_group, count), "needs the block of token"


def more_than_held(plain):
    for index, slot in plain.slots.items():
        for kv_group, held in enumerate(slot.held):
            yield (index, kv_group, len(held) + 1), f"it holds {len(held)}"
            yield (index, kv_group, 0), "0 blocks"


@pytest.mark.parametrize("wrong", [one_drop_more, more_than_held])
def test_a_drop_that_does_not_fit_is_refused_by_slot_and_group(wrong):
    tried = 0
    for seed in range(4):
        plain = PlainTables(WINDOWS["mixed"], seed)
        tables, _ = slot_tables(plain.windows)
        for _ in range(5):
            tables.apply(plain.step())
            for drop, says in wrong(plain):
                tried += 1
                where = f"slot {drop[0]}, KV group {drop[1]}, is to drop"
                with pytest.raises(DivergedError, match=f"{where} .*{says}"):
                    copy.deepcopy(tables).apply(Step(1, 1, 1, drops=(drop,)))
    assert tried > 50


# A slot of 10 tokens, computed up to the 8th, in two KV groups; the second sees 5 tokens.
@pytest.fixture
def tables():
    found, _ = slot_tables((0, 5))
    found.apply(
        Step(
            1,
            1,
            1,
            admissions=(admission(0, 0, ((), ())),),
            extensions=((0, tuple(range(10))),),
            new_blocks=((0, 0, 1), (0, 0, 2), (0, 1, 3), (0, 1, 4)),
            rows=(StepRow(0, 8, False),),
        )
    )
    return found


def admission(slot, cached, block_tables):
    ids = tuple(range(cached))
    return Admission(slot, ids, cached, cached, block_tables, SlotSampling(0.0, 1))


def test_what_is_dropped_and_given_in_one_step_holds_its_row(tables):
    (row,) = tables.apply(
        Step(
            1,
            1,
            1,
            drops=((0, 1, 1),),
            new_blocks=((0, 1, 9), (0, 0, 7)),
            rows=(StepRow(0, 2, True),),
            digest=zlib.crc32(struct.pack("<8I", 0, 10, 3, 7, 0, 10, 2, 9)),
        )
    )
    assert [(table.block_ids, table.start) for table in row.slot.tables] == [
        ([1, 2, 7], 0),
        ([4, 9], 4),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"drops": ((0, 0, 1),)},
            r"KV group 0, .* token 8 sees all and needs the block of token 0",
        ),
        ({"drops": ((0, 1, 2),)}, r"KV group 1, .* token 8 sees 5 tokens and needs .* token 4"),
        ({"drops": ((0, 2, 1),)}, "a drop for KV group 2 of slot 0; the model has 2"),
        ({"drops": ((1, 0, 1),)}, "drop for slot 1, which holds no request"),
        ({"new_blocks": ((0, 2, 5),)}, "a block for KV group 2 of slot 0; the model has 2"),
        ({"new_blocks": ((0, 1, CAPACITY),)}, f"slot 0, KV group 1, is given block {CAPACITY}"),
        (
            {"new_blocks": ((0, 0, 5),), "rows": (StepRow(0, 2, False),)},
            "slot 0, KV group 1, is to hold tokens 0 to 10 in 2 blocks of 4",
        ),
        (
            {
                "new_blocks": ((0, 0, 5), (0, 1, 6)),
                "drops": ((0, 1, 1),),
                "rows": (StepRow(0, 2, False),),
                "digest": zlib.crc32(struct.pack("<8I", 0, 10, 3, 5, 0, 10, 3, 6)),
            },
            "digest",
        ),
        (
            {"new_blocks": ((0, 0, 5), (0, 1, 5)), "rows": (StepRow(0, 2, False),)},
            "slot 0, KV group 0, is to write block 5, which is held 2 times",
        ),
        (
            {"admissions": (admission(1, 11, ((11, 12, 13), (14,))),)},
            "11 cached tokens in 1 blocks of 4 of KV group 1, whose window of 5 needs 2",
        ),
        (
            {"admissions": (admission(1, 4, ((11,), (12, 13))),)},
            "4 cached tokens in 2 blocks of 4 of KV group 1, whose window of 5 needs 1",
        ),
        ({"admissions": (admission(1, 8, ((11,), (12, 13))),)}, "1 blocks of 4 of KV group 0"),
        ({"admissions": (admission(1, 0, ((), (), ())),)}, "3 block tables; the model has 2"),
        ({"admissions": (admission(1, 0, ((),)),)}, "1 block tables; the model has 2"),
    ],
)
def test_what_does_not_fit_is_refused_by_slot_and_group(tables, changes, says):
    with pytest.raises(DivergedError, match=says):
        tables.apply(Step(1, 1, 1, **changes))


def test_a_windowed_table_ends_with_the_cached_prefix(tables):
    tables.apply(Step(1, 1, 1, admissions=(admission(1, 12, ((11, 12, 13), (14, 15))),)))
    (row,) = tables.apply(
        Step(
            1,
            1,
            1,
            extensions=((1, (5,)),),
            new_blocks=((1, 0, 16), (1, 1, 17)),
            rows=(StepRow(1, 1, True),),
        )
    )
    assert [(table.block_ids, table.start) for table in row.slot.tables] == [
        ([11, 12, 13, 16], 0),
        ([14, 15, 17], 4),
    ]


def test_every_group_must_own_the_block_it_writes():
    found, pool = slot_tables((0, 5))
    found.apply(Step(1, 1, 1, admissions=(admission(0, 8, ((1, 2), (3, 4))),)))
    pool.retain([6])
    step = Step(
        1,
        1,
        1,
        extensions=((0, (5,)),),
        new_blocks=((0, 0, 5), (0, 1, 6)),
        rows=(StepRow(0, 1, True),),
    )
    with pytest.raises(DivergedError, match="KV group 1, is to write block 6, which is held 2"):
        found.apply(replace(step))
