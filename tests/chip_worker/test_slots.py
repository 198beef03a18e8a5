"""Slot tables apply a step exactly, or refuse it."""

import struct
import zlib

import pytest

from backends.block_references import BlockReferences
from chip_worker.batch import Admission, RowWants, SlotSampling, Step, StepRow
from chip_worker.errors import DivergedError
from chip_worker.slots import SlotTables


def tables(pool=None):
    return SlotTables(
        slots_count=3,
        context_tokens=32,
        block_tokens=4,
        pool=BlockReferences(10) if pool is None else pool,
        row_tokens_max=16,
    )


def admit(slot=0, ids=(5, 6, 7, 8, 9), cached=0, blocks=()):
    return admit_tables(slot, ids, cached, (tuple(blocks),))


def admit_tables(slot, ids, cached, block_tables):
    return Admission(slot, tuple(ids), len(ids), cached, block_tables, SlotSampling(0.0, 1))


def step(**fields):
    return Step(1, 1, 1, **fields)


def admitted():
    found = tables()
    found.apply(step(admissions=(admit(),), new_blocks=((0, 0, 3), (0, 0, 4))))
    return found


def test_a_chunk_and_a_decode_row_compute_the_right_tokens():
    found = admitted()
    (row,) = found.apply(step(rows=(StepRow(0, 3, False),)))
    assert row.slot.tokens[row.start : row.stop].tolist() == [5, 6, 7]
    (row,) = found.apply(step(rows=(StepRow(0, 2, True),)))
    assert row.slot.tokens[row.start : row.stop].tolist() == [8, 9]
    found.record(row.slot, 42)
    (row,) = found.apply(step(rows=(StepRow(0, 1, True),)))
    assert row.slot.tokens[row.start : row.stop].tolist() == [42]
    assert row.slot.tables[0].block_ids == [3, 4]


def test_the_digest_is_that_of_the_protocol():
    found = admitted()
    found.apply(step(admissions=(admit(slot=2, ids=(1, 2, 3, 4, 5), cached=4, blocks=(9,)),)))
    expected = zlib.crc32(struct.pack("<8I", 0, 3, 2, 4, 2, 4, 1, 9))
    found.apply(step(rows=(StepRow(0, 3, False),), digest=expected))
    assert found.digest() == expected
    assert tables().digest() == 0


def test_a_slot_without_blocks_counts_in_the_digest():
    found = tables()
    found.apply(step(admissions=(admit(slot=1),)))
    assert found.digest() == zlib.crc32(struct.pack("<4I", 1, 0, 0, 0xFFFFFFFF))


def test_a_slot_can_be_released_and_admitted_in_one_step():
    found = admitted()
    (row,) = found.apply(
        step(
            releases=(0,),
            admissions=(admit(ids=(1, 2)),),
            new_blocks=((0, 0, 7),),
            rows=(StepRow(0, 2, True),),
        )
    )
    assert (row.start, row.stop, row.slot.tables[0].block_ids) == (0, 2, [7])


def test_an_admission_goes_on_with_extensions_even_below_its_cached_prefix():
    found = tables()
    found.apply(step(admissions=(admit(ids=(1, 2), cached=4, blocks=(0,)),)))
    found.apply(step(extensions=((0, (3, 4, 5)),), new_blocks=((0, 0, 1),)))
    (row,) = found.apply(step(rows=(StepRow(0, 1, True),)))
    assert row.slot.tokens[row.start : row.stop].tolist() == [5]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"releases": (1,)}, "slot 1"),
        ({"releases": (99,)}, "slot 99"),
        ({"admissions": (admit(slot=3),)}, "slot 3"),
        ({"admissions": (admit(slot=0),)}, "holds a request"),
        ({"admissions": (admit(slot=1, cached=5, blocks=(1,)),)}, "5 cached tokens"),
        ({"admissions": (admit(slot=1, cached=4, blocks=(10,)),)}, "block 10"),
        ({"admissions": (admit(slot=1, ids=range(33)),)}, "33 tokens"),
        ({"extensions": ((2, (1,)),)}, "slot 2"),
        ({"extensions": ((0, tuple(range(40))),)}, "45 tokens"),
        ({"new_blocks": ((1, 0, 0),)}, "slot 1"),
        ({"new_blocks": ((0, 0, -1),)}, "block -1"),
        ({"rows": (StepRow(1, 1, False),)}, "slot 1"),
        ({"rows": (StepRow(0, 6, True),)}, "knows 5"),
        ({"rows": (StepRow(0, 0, False),)}, "tokens 0 to 0"),
        ({"rows": (StepRow(0, 3, True),)}, "draw after token 3"),
        ({"rows": (StepRow(0, 1, False), StepRow(0, 1, False))}, "two rows"),
        ({"digest": 12345}, "digest"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, says):
    with pytest.raises(DivergedError, match=says):
        admitted().apply(step(**fields))


def test_a_row_needs_blocks_for_all_its_tokens():
    found = tables()
    found.apply(step(admissions=(admit(),), new_blocks=((0, 0, 0),)))
    with pytest.raises(DivergedError, match="1 blocks of 4"):
        found.apply(step(rows=(StepRow(0, 5, True),)))


def test_a_step_of_more_tokens_than_chunk_and_slots_allow_is_refused():
    found = tables()
    found.apply(
        step(
            admissions=(admit(ids=range(20)),),
            new_blocks=tuple((0, 0, block) for block in range(5)),
        )
    )
    with pytest.raises(DivergedError, match="17 tokens"):
        found.apply(step(rows=(StepRow(0, 17, False),)))


def test_the_context_can_be_filled_to_its_end():
    found = tables()
    found.apply(
        step(
            admissions=(admit(ids=range(32)),),
            new_blocks=tuple((0, 0, block) for block in range(8)),
            rows=(StepRow(0, 16, False),),
        )
    )
    (row,) = found.apply(step(rows=(StepRow(0, 16, True),)))
    found.record(row.slot, 1)
    with pytest.raises(DivergedError, match="context has 32"):
        found.apply(step(rows=(StepRow(0, 1, True),)))


def test_blocks_are_held_from_admission_to_release():
    pool = BlockReferences(10)
    found = tables(pool)
    found.apply(
        step(
            admissions=(
                admit(slot=0, cached=4, blocks=(3,)),
                admit(slot=1, cached=4, blocks=(3, 5)),
            ),
            new_blocks=((0, 0, 4),),
        )
    )
    assert [pool.references(block) for block in range(3, 7)] == [2, 1, 1, 0]
    found.apply(step(releases=(0,)))
    assert [pool.references(block) for block in range(3, 7)] == [1, 0, 1, 0]
    found.end()
    assert pool.referenced_count == 0


def test_a_shared_block_is_read_but_never_written():
    found = tables()
    ids = range(8)
    found.apply(
        step(
            admissions=(
                admit(slot=0, ids=ids, cached=4, blocks=(3, 4)),
                admit(slot=1, ids=ids, cached=4, blocks=(3, 5)),
                admit(slot=2, ids=ids, cached=3, blocks=(3, 6)),
            ),
        )
    )
    found.apply(step(rows=(StepRow(0, 4, True), StepRow(1, 2, False))))
    with pytest.raises(DivergedError, match=r"slot 2, .* to write block 3, which is held 3 times"):
        found.apply(step(rows=(StepRow(2, 1, False),)))


def test_a_block_given_twice_to_a_slot_is_not_written():
    found = tables()
    found.apply(step(admissions=(admit(ids=range(8)),), new_blocks=((0, 0, 3), (0, 0, 3))))
    with pytest.raises(DivergedError, match="block 3, which is held 2 times"):
        found.apply(step(rows=(StepRow(0, 8, True),)))


def test_an_epoch_that_leaves_a_block_behind_is_noticed():
    pool = BlockReferences(10)
    found = tables(pool)
    pool.retain([7])
    with pytest.raises(AssertionError, match="1 KV blocks are held by no slot"):
        found.end()


def scored_ranges(wants, chunks, output_start=5):
    """The tokens that chunks of one prompt score."""
    found = tables()
    ids = (5, 6, 7, 8, 9, 1, 2)
    admission = Admission(0, ids, output_start, 0, ((0, 1),), SlotSampling(0.0, 1), wants)
    found.apply(step(admissions=(admission,)))
    rows = [found.apply(step(rows=(StepRow(0, tokens, False),)))[0] for tokens in chunks]
    return [None if row.scored is None else list(row.scored) for row in rows]


def test_chunks_score_the_tokens_after_them_up_to_the_last_of_the_prompt():
    scoring = RowWants(prompt_top_tokens=0)
    assert scored_ranges(scoring, [3, 4]) == [[1, 2, 3], [4]]
    assert scored_ranges(scoring, [4, 1, 1, 1]) == [[1, 2, 3, 4], [], None, None]
    assert scored_ranges(scoring, [7], output_start=7) == [[1, 2, 3, 4, 5, 6]]
    assert scored_ranges(scoring, [7], output_start=1) == [[]]
    assert scored_ranges(RowWants(), [3, 4]) == [None, None]
