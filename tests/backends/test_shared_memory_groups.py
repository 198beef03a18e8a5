"""Sums in a group of the cpu backend's collectives: small neighbours travel as one message."""

import itertools
import random
from contextlib import closing

import pytest
import torch

from backends.cpu.shared_memory_end import SharedMemorySettings
from backends.cpu.shared_memory_library import LIBRARY_PATH
from backends.errors import CommunicatorError, CommunicatorMisuse
from tests.fakes.shared_memory_ranks import SMALL, SharedMemoryRanks

WHOLE = SharedMemorySettings()
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
LENGTHS = (0, 1, 3, 17, 64, 512, 1100, 20_000)

pytestmark = pytest.mark.skipif(
    not LIBRARY_PATH.exists(), reason="no compiler: scripts/setup built no native collectives"
)


@pytest.fixture
def ranks():
    with closing(SharedMemoryRanks()) as opened:
        yield opened


def brought(rank, length, dtype, seed):
    """Small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-9, 10, (length,), generator=generator).to(dtype)


@pytest.mark.parametrize("settings", [WHOLE, SMALL], ids=["whole", "small"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_groups_give_what_their_sums_give_apart(ranks, world_size, settings):
    """Of all sizes and dtypes, up to more than travel as one; waited for in any order."""
    ranks.form(world_size, settings=settings)
    draw = random.Random(world_size)
    groups = [
        [(draw.choice(LENGTHS), draw.choice(DTYPES)) for _ in range(draw.choice([1, 2, 8, 90]))]
        for _ in range(20)
    ]

    def run(communicator):
        own_draw = random.Random(communicator.rank)
        results = []
        for seed, sums in enumerate(groups):
            tensors = [brought(communicator.rank, *each, seed) for each in sums]
            with communicator.group():
                works = [communicator.all_reduce(tensor) for tensor in tensors]
            own_draw.shuffle(works)
            for work in works:
                work.wait()
                assert work.done()
                assert work.exception() is None
            results += tensors
        return results

    expected = [
        sum(brought(rank, length, dtype, seed) for rank in range(world_size))
        for seed, sums in enumerate(groups)
        for length, dtype in sums
    ]
    for results in ranks.together(run):
        assert all(map(torch.equal, results, expected))


def test_small_neighbours_of_one_dtype_are_one_message(ranks):
    """So a rank that sums them one by one calls something else, and hears so."""
    ranks.form()

    def run(communicator):
        first, second = torch.ones(16), torch.ones(16)
        if communicator.rank == 0:
            with communicator.group():
                communicator.all_reduce(first)
                work = communicator.all_reduce(second)
            work.wait()
        else:
            communicator.all_reduce(first).wait()

    grouped, apart = ranks.together(run)
    assert isinstance(grouped, CommunicatorMisuse)
    assert "all_reduce of 128 bytes" in str(grouped)
    assert isinstance(apart, CommunicatorMisuse)


def test_ranks_that_divide_one_message_otherwise_are_told_so(ranks):
    ranks.form()

    def run(communicator):
        sizes = (16, 32) if communicator.rank == 0 else (32, 16)
        with communicator.group():
            works = [communicator.all_reduce(torch.ones(size)) for size in sizes]
        works[0].wait()

    for error in ranks.together(run):
        assert isinstance(error, CommunicatorMisuse)
        assert "in other parts" in str(error)


def test_the_first_message_of_a_group_that_fails_says_why(ranks):
    """Those after it are not taken any more."""
    ranks.form()

    def run(communicator):
        size = 16 if communicator.rank == 0 else 32
        with communicator.group():
            works = [communicator.all_reduce(torch.ones(size))]
            works += [communicator.all_reduce(torch.ones(2000)) for _ in range(20)]
        works[-1].wait()

    for error in ranks.together(run):
        assert isinstance(error, CommunicatorMisuse)


def test_other_collectives_and_waits_inside_come_after_the_sums_before_them(ranks):
    ranks.form()

    def run(communicator):
        rank, tensors = communicator.rank, [torch.full((3,), float(i)) for i in range(4)]
        gathered, whole = torch.zeros(2, 3), torch.zeros(3)
        with communicator.group():
            asked = communicator.all_reduce(tensors[0])
            assert not asked.done()
            assert asked.exception() is None
            communicator.all_gather(torch.full((3,), float(rank)), gathered).wait()
            assert asked.done()
            communicator.all_reduce(tensors[1])
            with communicator.group():
                asked = communicator.all_reduce(tensors[2])
            assert not asked.done()
            asked.wait_stream()
            summed = tensors[1].tolist()
            communicator.reduce_scatter(torch.ones(2, 3), whole)
            last = communicator.all_reduce(tensors[3])
        last.wait()
        return summed, [tensor[0].item() for tensor in tensors], gathered[1, 0].item(), whole[0]

    assert ranks.together(run) == [([2.0] * 3, [0.0, 2.0, 4.0, 6.0], 1.0, 2.0)] * 2


def test_messages_between_two_ranks_divide_no_sums(ranks):
    """The third rank does not hear of them, and must pack alike."""
    ranks.form(3)

    def run(communicator):
        tensors, message = [torch.ones(5) for _ in range(3)], torch.full((4,), 7.0)
        with communicator.group():
            communicator.all_reduce(tensors[0])
            if communicator.rank == 0:
                communicator.send(message, 1)
            communicator.all_reduce(tensors[1])
            if communicator.rank == 1:
                message.zero_()
                communicator.receive(message, 0).wait()
            work = communicator.all_reduce(tensors[2])
        work.wait()
        return torch.stack(tensors).unique().tolist() + message.tolist()

    assert ranks.together(run) == [[3.0] + [7.0] * 4] * 3


def test_an_error_in_a_group_drops_what_was_not_submitted(ranks):
    ranks.form()

    def run(communicator):
        tensor, works = torch.ones(3), []

        def fail_in_group():
            with communicator.group():
                works.append(communicator.all_reduce(tensor))
                works[0].wait()
                works.append(communicator.all_reduce(tensor))
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fail_in_group()
        works[0].wait()
        assert works[1].done()
        for wait in (works[1].wait, works[1].wait_stream):
            with pytest.raises(CommunicatorError, match="group ended with an error"):
                wait()
        # Nothing of it is left for the next one, nor is the group still open.
        communicator.all_reduce(tensor).wait()
        return tensor.tolist()

    assert ranks.together(run) == [[4.0] * 3] * 2


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_group_of_a_communicator_that_ended_fails(ranks, end):
    communicator = ranks.form()[0]
    works = []

    def group():
        with communicator.group():
            works.append(communicator.all_reduce(torch.ones(3)))
            getattr(communicator, end)()
            works.append(communicator.all_reduce(torch.ones(3)))

    with pytest.raises(CommunicatorError, match="closed or broken"):
        group()
    for work in works:
        assert work.done()
        with pytest.raises(CommunicatorError, match="closed"):
            work.wait()


def test_tensors_of_a_group_live_until_they_are_summed(ranks):
    """Nobody else holds them; the other rank comes later."""
    first, second = ranks.form()
    works = []
    for index in range(20):
        with first.group():
            works += [first.all_reduce(torch.full((n,), 1000.0 + index)) for n in (40, 3, 700)]
    others = [torch.zeros(n) for _ in range(40) for n in (40, 3, 700)]  # where freed ones were
    results = []
    for _ in range(20):
        with second.group():
            results += [torch.ones(length) for length in (40, 3, 700)]
            last = [second.all_reduce(tensor) for tensor in results[-3:]][-1]
    for work in [*works, last]:
        work.wait()
    expected = itertools.chain.from_iterable([1001.0 + index] * 3 for index in range(20))
    assert not any(other.any() for other in others)
    assert [tensor.unique().tolist() for tensor in results] == [[each] for each in expected]
