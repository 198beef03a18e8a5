"""The ledger's promise: free + cached + referenced = total, whatever is done in whatever order."""

from random import Random

import pytest

from control_plane.scheduling.block_ledger import BlockLedger
from control_plane.scheduling.messages import BlockCounts


def test_a_block_goes_from_free_over_referenced_and_cached_back_to_free() -> None:
    ledger = BlockLedger(3)
    block_id = ledger.allocate()
    assert ledger.counts() == BlockCounts(2, 0, 1, 3)
    ledger.mark_indexed(block_id)
    ledger.reference(block_id)
    ledger.release(block_id)
    assert ledger.counts() == BlockCounts(2, 0, 1, 3)
    ledger.release(block_id)
    assert ledger.counts() == BlockCounts(2, 1, 0, 3)
    ledger.evict(block_id)
    assert ledger.counts() == BlockCounts(3, 0, 0, 3)


def test_a_block_that_is_not_indexed_becomes_free_at_once() -> None:
    ledger = BlockLedger(1)
    ledger.release(ledger.allocate())
    assert ledger.counts() == BlockCounts(1, 0, 0, 1)


def test_whoever_gives_up_a_shared_windowed_block_can_take_another() -> None:
    ledger = BlockLedger(3)
    shared = ledger.allocate(windowed=True)
    ledger.mark_indexed(shared)
    ledger.reference(shared)
    ledger.reference(shared)
    assert ledger.counts() == BlockCounts(2, 0, 1, 3)
    assert ledger.available_count == 0, "three hold it: two may give it up and take another"
    ledger.check_integrity([shared] * 3, {shared})
    assert ledger.returns(shared) == 1
    ledger.release(shared)
    ledger.release(shared)
    assert ledger.available_count == 2
    ledger.release(shared)
    assert ledger.counts() == BlockCounts(2, 1, 0, 3)
    assert ledger.available_count == 3


def test_a_shared_block_without_a_window_returns_with_its_last_reference() -> None:
    ledger = BlockLedger(2)
    block_id = ledger.allocate()
    ledger.mark_indexed(block_id)
    ledger.reference(block_id)
    assert ledger.available_count == 1
    assert ledger.returns(block_id) == 0
    ledger.release(block_id)
    assert ledger.returns(block_id) == 1


def test_misuse_is_refused() -> None:
    ledger = BlockLedger(2)
    block_id = ledger.allocate()
    with pytest.raises(AssertionError):
        ledger.reference(block_id)
    ledger.mark_indexed(block_id)
    with pytest.raises(AssertionError):
        ledger.evict(block_id)
    ledger.release(block_id)
    with pytest.raises(AssertionError):
        ledger.release(block_id)


def test_integrity_check_finds_a_leak() -> None:
    ledger = BlockLedger(2)
    ledger.allocate()
    with pytest.raises(AssertionError):
        ledger.check_integrity([], set())


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_conserved(seed: int) -> None:
    random = Random(seed)
    ledger = BlockLedger(8)
    held: list[int] = []
    indexed: set[int] = set()
    for _ in range(300):
        choice = random.randrange(5)
        cached = [i for i in indexed if i not in held]
        if choice == 0 and ledger.free_count:
            held.append(ledger.allocate())
        elif choice == 1 and held:
            ledger.release(held.pop(random.randrange(len(held))))
        elif choice == 2 and set(held) - indexed:
            block_id = random.choice(sorted(set(held) - indexed))
            ledger.mark_indexed(block_id)
            indexed.add(block_id)
        elif choice == 3 and indexed:
            block_id = random.choice(sorted(indexed))
            ledger.reference(block_id)
            held.append(block_id)
        elif choice == 4 and cached:
            ledger.evict(cached[0])
            indexed.remove(cached[0])
        ledger.check_integrity(held, indexed)
        counts = ledger.counts()
        assert counts.free + counts.cached + counts.referenced == counts.total == 8
