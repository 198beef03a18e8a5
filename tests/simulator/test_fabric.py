"""Collectives between simulated chips: exact, late, in order, and never hanging."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from backends.errors import (
    CommunicatorError,
    CommunicatorMisuse,
    CommunicatorTimeout,
    DeviceError,
    DeviceHung,
    DeviceLost,
    PeerLost,
)
from backends.simulator.fabric import Fabric, SimDeadlock
from backends.simulator.fabric_communicator import FabricCommunicator

EXECUTIONS = ("latest", "earliest", "random")
DEADLINE_S = 30.0


def linked(new_chip, ranks, **options):
    chips = [new_chip(index=rank, **options) for rank in range(ranks)]
    group = Fabric().link(chips, DEADLINE_S)
    return [FabricCommunicator(group, rank) for rank in range(ranks)], chips


def put(chip, values):
    tensor = chip.allocate_tensor(values.shape, values.dtype)
    chip.copy_from_host(values, tensor, blocking=True)
    return tensor


def get(chip, tensor):
    target = torch.zeros_like(tensor)
    chip.copy_to_host(tensor, target, blocking=True)
    return target


def on_every_rank(function, ranks):
    """What function(rank) returned or raised on each rank, each in a thread of its own."""
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(function, rank) for rank in range(ranks)]
        return [future.exception(timeout=20) or future.result() for future in futures]


def ask_all(communicator, chip, seed):
    """All six operations with random contents; what they gave."""
    rank, ranks = communicator.rank, communicator.world_size
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    mine = [put(chip, torch.randn(ranks, 5, generator=generator)) for _ in range(6)]
    gathered = chip.allocate_tensor((ranks, ranks, 5), torch.float32)
    scattered = chip.allocate_tensor((5,), torch.float32)
    neighbour, before = (rank + 1) % ranks, (rank - 1) % ranks
    works = [
        communicator.all_reduce(mine[0]),
        communicator.all_gather(mine[1], gathered),
        communicator.reduce_scatter(mine[2], scattered),
        communicator.broadcast(mine[3], 1),
    ]
    exchange = [
        lambda: communicator.send(mine[4], neighbour),
        lambda: communicator.receive(mine[5], before),
    ]
    works += [ask() for ask in (exchange if rank else exchange[::-1])]
    for work in works:
        work.wait_stream()
    return [get(chip, tensor) for tensor in (mine[0], gathered, scattered, mine[3], mine[5])]


def expected_of_all(ranks, seed):
    given = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        given.append([torch.randn(ranks, 5, generator=generator) for _ in range(6)])

    def add(parts):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    return [
        [
            add([given[r][0] for r in range(ranks)]),
            torch.stack([given[r][1] for r in range(ranks)]),
            add([given[r][2][rank] for r in range(ranks)]),
            given[1][3],
            given[(rank - 1) % ranks][4],
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_exact_and_the_same_bits_on_every_rank(new_chip, ranks, execution, is_blocking):
    communicators, chips = linked(
        new_chip, ranks, execution=execution, seed=ranks, blocking_collectives=is_blocking
    )
    for seed in range(3):
        results = on_every_rank(lambda r, s=seed: ask_all(communicators[r], chips[r], s), ranks)
        for got, expected in zip(results, expected_of_all(ranks, seed), strict=True):
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert len({chip.clock.now_s for chip in chips}) >= 1


def test_one_thread_can_drive_all_ranks_where_collectives_do_not_block(new_chip):
    """A chip goes on by itself: rank 1's host never waits, and rank 0 gets its part."""
    communicators, chips = linked(new_chip, 2)
    tensors = [put(chip, torch.ones(4)) for chip in chips]
    works = [communicator.all_reduce(tensor) for communicator, tensor in
             zip(communicators, tensors, strict=True)]  # fmt: skip
    assert torch.equal(tensors[0], torch.ones(4)), "nobody has waited"
    works[0].wait()
    assert works[1].exception() is None
    assert all(torch.equal(tensor, torch.full((4,), 2.0)) for tensor in tensors)
    assert not works[1].done(), "the clock of rank 1's host has not come so far"
    chips[1].clock.wait_until(chips[0].clock.now_s)
    assert works[1].done()


def test_a_result_that_nobody_waited_for_is_the_old_one(new_chip):
    for waits, expected in ((True, 2.0), (False, 1.0)):
        communicators, chips = linked(new_chip, 2)
        tensors = [put(chip, torch.ones(4)) for chip in chips]
        works = [communicators[rank].all_reduce(tensors[rank]) for rank in range(2)]
        if waits:
            works[0].wait_stream()
        assert torch.equal(get(chips[0], tensors[0]), torch.full((4,), expected))


def test_an_event_behind_a_collective_is_reached_without_any_host_waiting(new_chip):
    communicators, chips = linked(new_chip, 2)
    tensors = [put(chip, torch.ones(4)) for chip in chips]
    for rank in range(2):
        communicators[rank].all_reduce(tensors[rank]).wait_stream()
    event = chips[0].record()
    assert not event.query()
    chips[0].clock.advance(1.0)
    assert event.query()


def test_a_message_is_what_was_sent_whatever_its_sender_does_next(new_chip):
    communicators, chips = linked(new_chip, 2)
    sent, received = put(chips[0], torch.ones(4)), put(chips[1], torch.zeros(4))
    communicators[0].send(sent, 1).wait()
    chips[0].launch("fill", lambda: sent.fill_(7), writes=[sent])
    chips[0].synchronize()
    communicators[1].receive(received, 0).wait()
    assert torch.equal(received, torch.ones(4))


def test_a_contribution_from_a_side_stream_must_be_ordered(new_chip):
    for is_ordered in (True, False):
        communicators, chips = linked(new_chip, 2)
        tensors = [chip.allocate_tensor((4,), torch.float32) for chip in chips]
        for rank, (chip, tensor) in enumerate(zip(chips, tensors, strict=True)):
            side = chip.stream() if rank else chip.default_stream
            chip.launch("fill", lambda t=tensor: t.fill_(1), writes=[tensor], stream=side)
            if is_ordered:
                chip.default_stream.wait_event(side.record())
        works = [communicators[rank].all_reduce(tensors[rank]) for rank in range(2)]
        works[0].wait()
        poisoned = tensors[0].isnan().all()
        assert poisoned != is_ordered


@pytest.mark.parametrize("late", [0, 1])
def test_a_collective_takes_a_fixed_time_and_its_bytes(new_chip, late):
    """1000 bytes: 40 us and 1000 us, begun when the later rank is there."""
    communicators, chips = linked(new_chip, 2)
    tensors = [put(chip, torch.ones(250)) for chip in chips]
    chips[late].clock.advance(0.5)
    starts = [chip.clock.now_s for chip in chips]
    for work in [communicators[rank].all_reduce(tensors[rank]) for rank in range(2)]:
        work.wait()
    for chip in chips:
        assert chip.clock.now_s == pytest.approx(starts[late] + 10e-6 + 1040e-6)
        assert chip.statistics().communication_s == pytest.approx(1040e-6)


def test_fusing_messages_saves_their_fixed_times_and_no_more(new_chip):
    spent = []
    for messages in (8, 1):
        communicators, chips = linked(new_chip, 2)
        count = 64 // messages
        for _ in range(messages):
            tensors = [chip.allocate_tensor((count,), torch.float32) for chip in chips]
            for rank in range(2):
                communicators[rank].all_reduce(tensors[rank])
        for chip in chips:
            chip.synchronize()
        spent.append(chips[0].statistics().communication_s)
    assert spent[0] - spent[1] == pytest.approx(7 * 40e-6, rel=1e-9)


def test_communication_overlaps_computation_unless_it_blocks(new_chip):
    for is_blocking, expected in ((False, 1e-3), (True, 0.0)):
        communicators, chips = linked(new_chip, 2, blocking_collectives=is_blocking)
        tensors = [put(chip, torch.ones(250)) for chip in chips]

        def step(rank, communicators=communicators, chips=chips, tensors=tensors):
            work = communicators[rank].all_reduce(tensors[rank])
            chips[rank].launch("linear", lambda: None, seconds=1e-3)
            work.wait_stream()
            chips[rank].synchronize()

        assert on_every_rank(step, 2) == [None, None]
        assert chips[0].statistics().overlapped_s == pytest.approx(expected, abs=1e-4)


def test_ranks_that_ask_for_different_things_are_told_and_do_not_hang(new_chip):
    def differing(communicator, chip, rank, way):
        tensor = put(chip, torch.ones(4))
        if way == "order" and rank:
            communicator.broadcast(tensor, 0).wait()
        elif way == "count" and rank:
            communicator.all_reduce(put(chip, torch.ones(3))).wait()
        elif way == "dtype" and rank:
            communicator.all_reduce(put(chip, torch.ones(4, dtype=torch.int32))).wait()
        elif way == "root":
            communicator.broadcast(tensor, rank).wait()
        else:
            communicator.all_reduce(tensor).wait()

    for way in ("order", "count", "dtype", "root"):
        communicators, chips = linked(new_chip, 2)
        errors = on_every_rank(
            lambda r, w=way, cs=communicators, ch=chips: differing(cs[r], ch[r], r, w), 2
        )
        assert [type(error) for error in errors] == [CommunicatorMisuse] * 2, way
        assert "same order" in str(errors[0])


def test_a_ring_in_which_everyone_sends_first_deadlocks_where_sends_block(new_chip):
    def ring(communicator, chip):
        tensor, received = put(chip, torch.ones(4)), put(chip, torch.zeros(4))
        rank, ranks = communicator.rank, communicator.world_size
        communicator.send(tensor, (rank + 1) % ranks)
        communicator.receive(received, (rank - 1) % ranks).wait()

    for is_blocking in (True, False):
        communicators, chips = linked(new_chip, 3, blocking_collectives=is_blocking)
        started_s = time.monotonic()
        errors = on_every_rank(lambda r, cs=communicators, ch=chips: ring(cs[r], ch[r]), 3)
        assert [type(error) for error in errors] == [SimDeadlock if is_blocking else type(None)] * 3
        assert time.monotonic() - started_s < 5.0


def test_crossed_waits_are_a_deadlock_and_a_busy_rank_is_none(new_chip):
    """Rank 0 waits for a message, rank 1 for a collective; rank 2 first computes, then comes."""
    communicators, chips = linked(new_chip, 3)

    def crossed(rank):
        tensor = put(chips[rank], torch.ones(4))
        if rank == 0:
            communicators[0].receive(tensor, 1).wait()
        if rank == 2:
            time.sleep(0.2)
        communicators[rank].all_reduce(tensor).wait()

    errors = on_every_rank(crossed, 3)
    assert [type(error) for error in errors] == [SimDeadlock] * 3
    assert "receive number 1 from 1 to 0" in str(errors[2])


def test_a_single_thread_that_waits_before_the_others_are_asked_is_told(new_chip):
    communicators, chips = linked(new_chip, 2)
    with pytest.raises(SimDeadlock, match="have not reached"):
        communicators[0].all_reduce(put(chips[0], torch.ones(4))).wait()


def test_a_hang_ends_at_the_deadline_of_simulated_time(new_chip):
    communicators, chips = linked(new_chip, 2, faults="chip1:hang@collective=2")
    started_s = time.monotonic()

    def work(rank):
        tensor = put(chips[rank], torch.ones(4))
        for _ in range(2):
            communicators[rank].all_reduce(tensor).wait()

    errors = on_every_rank(work, 2)
    assert [type(error) for error in errors] == [CommunicatorTimeout] * 2
    assert max(chip.clock.now_s for chip in chips) >= DEADLINE_S
    assert time.monotonic() - started_s < 5.0


def test_a_kernel_that_hangs_holds_its_peers_until_their_timeout(new_chip):
    communicators, chips = linked(new_chip, 2, faults="chip1:hang@launch=1")

    def work(rank):
        tensor = put(chips[rank], torch.ones(4))
        chips[rank].launch("kernel", lambda: None)
        communicators[rank].all_reduce(tensor).wait(timeout_s=2.0)

    errors = on_every_rank(work, 2)
    assert {type(errors[0]), type(errors[1])} <= {CommunicatorTimeout, DeviceHung}
    assert isinstance(errors[0], CommunicatorTimeout)


@pytest.mark.parametrize("fault", ["error@collective=1", "death@collective=1", "error@launch=1"])
def test_a_peer_that_is_lost_is_noticed_at_once(new_chip, fault):
    communicators, chips = linked(new_chip, 3, faults=f"chip2:{fault}")
    started_s = time.monotonic()

    def work(rank):
        chips[rank].launch("kernel", lambda: None)
        tensor = put(chips[rank], torch.ones(4)) if "launch" not in fault else None
        if tensor is None:
            tensor = chips[rank].allocate_tensor((4,), torch.float32)
        communicators[rank].all_reduce(tensor).wait()

    errors = on_every_rank(work, 3)
    assert [type(error) for error in errors] == [PeerLost, PeerLost, DeviceLost]
    assert time.monotonic() - started_s < 5.0
    chips[0].synchronize()


def test_a_rank_that_leaves_is_missed_by_those_who_come_later(new_chip):
    communicators, chips = linked(new_chip, 2)

    def work(rank):
        tensor = put(chips[rank], torch.ones(4))
        communicators[rank].all_reduce(tensor).wait()
        if rank:
            communicators[rank].close()
        else:
            communicators[rank].all_reduce(tensor).wait()

    errors = on_every_rank(work, 2)
    assert isinstance(errors[0], PeerLost)
    assert errors[1] is None


def test_a_broken_group_is_reported_once_and_the_chip_goes_on(new_chip):
    communicators, chips = linked(new_chip, 2)
    tensor = put(chips[0], torch.ones(4))
    works = [communicators[0].all_reduce(tensor) for _ in range(3)]
    communicators[1].close()
    with pytest.raises(PeerLost):
        works[0].wait()
    chips[0].synchronize()
    with pytest.raises(PeerLost):
        works[2].wait()
    assert torch.equal(get(chips[0], tensor), torch.ones(4))


def test_asking_whether_it_is_done_notices_a_lost_peer(new_chip):
    communicators, chips = linked(new_chip, 2)
    work = communicators[0].all_reduce(put(chips[0], torch.ones(4)))
    assert not work.done()
    communicators[1].close()
    assert work.done()
    assert isinstance(work.exception(), PeerLost)


def test_abort_wakes_those_who_wait(new_chip):
    communicators, chips = linked(new_chip, 2)
    waiting = threading.Event()

    def work(rank):
        if rank:
            waiting.wait(5)
            communicators[1].abort()
            return
        asked = communicators[0].all_reduce(put(chips[0], torch.ones(4)))
        waiting.set()
        asked.wait()

    errors = on_every_rank(work, 2)
    assert type(errors[0]) is CommunicatorError
    with pytest.raises(CommunicatorError, match="aborted"):
        communicators[0].all_reduce(put(chips[0], torch.ones(4)))


def test_the_first_collective_can_fail_on_a_chip_that_works_alone(new_chip):
    communicators, chips = linked(new_chip, 2, faults="chip1:fail@probe_collective")

    def work(rank):
        try:
            communicators[rank].all_reduce(put(chips[rank], torch.ones(4))).wait()
        finally:
            communicators[rank].close()

    errors = on_every_rank(work, 2)
    assert isinstance(errors[0], PeerLost)
    assert type(errors[1]) is DeviceError


def test_ranks_meet_by_key_and_not_for_ever(new_chip):
    fabric, chips = Fabric(), [new_chip(index=rank) for rank in range(2)]

    def join(rank, world_size=2):
        return fabric.join(chips[rank], "epoch 1", rank, world_size,
                           join_deadline_s=5, step_deadline_s=5)  # fmt: skip

    groups = on_every_rank(join, 2)
    assert groups[0] is groups[1]
    with pytest.raises(CommunicatorTimeout, match=r"only ranks \[0\] of 2 joined"):
        fabric.join(chips[0], "epoch 2", 0, 2, join_deadline_s=0.05, step_deadline_s=5)
    with pytest.raises(CommunicatorError, match="cannot exchange with rank 2"):
        FabricCommunicator(groups[0], 0).send(put(chips[0], torch.ones(1)), 2)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_random_work_between_collectives_gives_one_result(new_chip, execution):
    def work(rank, communicators, chips):
        chance = random.Random(11)
        chip, communicator = chips[rank], communicators[rank]
        tensors = [put(chip, torch.full((6,), float(rank + each))) for each in range(3)]
        for _ in range(40):
            tensor = tensors[chance.randrange(3)]
            if chance.random() < 0.5:
                communicator.all_reduce(tensor).wait_stream()
            chip.launch("mix", lambda t=tensor: t.mul_(3).fmod_(101), reads=[tensor],
                        writes=[tensor], seconds=1e-5)  # fmt: skip
            if chance.random() < 0.1:
                chip.synchronize()
        return torch.stack([get(chip, tensor) for tensor in tensors]), chip.clock.now_s

    communicators, chips = linked(new_chip, 2)
    expected = on_every_rank(lambda r: work(r, communicators, chips), 2)
    communicators, chips = linked(new_chip, 2, execution=execution, seed=3)
    for got, want in zip(
        on_every_rank(lambda r: work(r, communicators, chips), 2), expected, strict=True
    ):
        assert torch.equal(got[0], want[0])
        assert got[1] == pytest.approx(want[1], abs=1e-12)
