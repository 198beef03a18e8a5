"""Collectives of a backend: results, bit-identity and order, between threads and real processes."""

import time
import zlib
from functools import partial

import pytest
import torch

from backends.errors import CommunicatorError, CommunicatorTimeout, PeerLost
from backends.fusion import FusedCommunicator
from backends.interface import GroupPlace
from tests.backends.local_ranks import LocalRanks

BOUND_S = 15.0
SHORT_S = 0.5
SHAPES = ((1,), (577,), (3, 0), (64, 577), (7, 33, 5))
# Sums of numbers near a thousand, rounded once more than the exact sum is.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="session", params=[2, 3, 4])
def opened_ranks(request, backend_name, backend_options, device):  # noqa: ARG001 - as it was, at the end
    ranks = LocalRanks(backend_name, request.param, backend_options)
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(opened_ranks):
    """2, 3 and 4 ranks of a new epoch."""
    opened_ranks.form()
    yield opened_ranks
    opened_ranks.leave()


def values(world_size, shape, dtype):
    """Every rank's tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    return (torch.randn((world_size, *shape), generator=generator) * 1000).to(dtype)


def check_sum(actual, parts):
    """In whole numbers exactly, else within the rounding of the dtype."""
    exact = parts.double().sum(0)
    tolerance = TOLERANCES.get(actual.dtype, 0.0)
    torch.testing.assert_close(
        actual.double(), exact, rtol=tolerance, atol=tolerance * 1000, equal_nan=True
    )


def check_alike(results):
    """Bit by bit, on every rank."""
    crcs = {zlib.crc32(each.contiguous().view(torch.uint8).numpy().tobytes()) for each in results}
    assert len(crcs) == 1


# ---------------------------------------------------------------- the six operations


@pytest.mark.covers("all_reduce")
@pytest.mark.parametrize("shape", SHAPES)
def test_all_reduce_sums_alike_to_the_bit(ranks, dtype, shape):
    everyone = values(ranks.world_size, shape, dtype)

    def run(rank):
        tensor = ranks.devices[rank].to_chip(everyone[rank])
        ranks.communicators[rank].all_reduce(tensor).wait()
        return ranks.devices[rank].to_host(tensor)

    results = ranks.together(run)
    check_sum(results[0], everyone)
    check_alike(results)


@pytest.mark.covers("reduce_scatter")
@pytest.mark.parametrize("shape", SHAPES)
def test_reduce_scatter_gives_each_its_part_of_the_sum(ranks, dtype, shape):
    everyone = values(ranks.world_size * ranks.world_size, shape, dtype)
    everyone = everyone.view(ranks.world_size, ranks.world_size, *shape)

    def run(rank):
        device = ranks.devices[rank]
        output = device.allocate(shape, dtype)
        ranks.communicators[rank].reduce_scatter(device.to_chip(everyone[rank]), output).wait()
        return device.to_host(output)

    for rank, result in enumerate(ranks.together(run)):
        check_sum(result, everyone[:, rank])


@pytest.mark.covers("all_gather")
@pytest.mark.parametrize("shape", SHAPES)
def test_all_gather_puts_every_rank_in_its_place(ranks, dtype, shape):
    everyone = values(ranks.world_size, shape, dtype)

    def run(rank):
        device = ranks.devices[rank]
        output = device.allocate(everyone.shape, dtype)
        ranks.communicators[rank].all_gather(device.to_chip(everyone[rank]), output).wait()
        return device.to_host(output)

    for result in ranks.together(run):
        assert torch.equal(result, everyone)


@pytest.mark.covers("broadcast")
@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast_from_every_root(ranks, dtype, shape):
    everyone = values(ranks.world_size, shape, dtype)

    def run(rank):
        device, results = ranks.devices[rank], []
        for root in range(ranks.world_size):
            tensor = device.to_chip(everyone[rank])
            ranks.communicators[rank].broadcast(tensor, root).wait()
            results.append(device.to_host(tensor))
        return results

    for results in ranks.together(run):
        for root, result in enumerate(results):
            assert torch.equal(result, everyone[root])


@pytest.mark.covers("send", "receive")
@pytest.mark.parametrize("shape", SHAPES)
def test_messages_round_a_ring_keep_their_order(ranks, dtype, shape):
    """Even ranks send first: a send may last until it is received."""
    everyone = values(2 * ranks.world_size, shape, dtype).view(2, ranks.world_size, *shape)

    def run(rank):
        device, communicator = ranks.devices[rank], ranks.communicators[rank]
        received = [device.allocate(shape, dtype) for _ in range(2)]

        def send():
            for each in everyone:
                right = (rank + 1) % ranks.world_size
                communicator.send(device.to_chip(each[rank]), right).wait()

        def receive():
            for tensor in received:
                communicator.receive(tensor, (rank - 1) % ranks.world_size).wait()

        for step in (send, receive) if rank % 2 == 0 else (receive, send):
            step()
        return [device.to_host(tensor) for tensor in received]

    for rank, results in enumerate(ranks.together(run)):
        for message, result in enumerate(results):
            assert torch.equal(result, everyone[message][rank - 1])


@pytest.mark.covers("all_reduce", "all_gather", "broadcast", dtype="int64")
def test_whole_numbers_are_exact(ranks):
    everyone = values(ranks.world_size, (33,), torch.int64) + (1 << 40)

    def run(rank):
        device, communicator = ranks.devices[rank], ranks.communicators[rank]
        total, root = device.to_chip(everyone[rank]), device.to_chip(everyone[rank])
        gathered = device.allocate(everyone.shape, torch.int64)
        communicator.all_reduce(total).wait()
        communicator.broadcast(root, 1).wait()
        communicator.all_gather(device.to_chip(everyone[rank]), gathered).wait()
        return [device.to_host(each) for each in (total, root, gathered)]

    for total, root, gathered in ranks.together(run):
        assert torch.equal(total, everyone.sum(0))
        assert torch.equal(root, everyone[1])
        assert torch.equal(gathered, everyone)


# ---------------------------------------------------------------- order


@pytest.mark.covers("all_reduce", dtype="float32")
def test_what_is_asked_after_a_stream_wait_sees_the_result(ranks):
    """The host never waits: copies before and after the sum each see their own contents."""
    rounds = 10

    def run(rank):
        device, seen = ranks.devices[rank], []
        tensor = device.to_chip(torch.full((300,), float(rank + 1)))
        for _ in range(rounds):
            before, after = (device.allocate((300,), torch.float32) for _ in range(2))
            device.copy(tensor, before)
            ranks.communicators[rank].all_reduce(tensor).wait_stream()
            device.copy(tensor, after)
            seen += [before, after]
        return [device.to_host(each)[[0, 299]].tolist() for each in seen]

    size = ranks.world_size
    first = size * (size + 1) / 2
    for rank, seen in enumerate(ranks.together(run)):
        for step in range(rounds):
            before = rank + 1 if step == 0 else first * size ** (step - 1)
            assert seen[2 * step] == [before] * 2
            assert seen[2 * step + 1] == [first * size**step] * 2


@pytest.mark.covers("all_reduce", "all_gather", "reduce_scatter", "broadcast", dtype="float32")
@pytest.mark.parametrize("fused", [False, True])
def test_a_random_program_gives_what_it_says(ranks, fused):
    """Small whole numbers, so that every sum is exact; in groups, fused or not."""
    size = ranks.world_size
    program = random_program(size, seed=5, steps=60)

    def run(rank):
        device, communicator = ranks.devices[rank], ranks.communicators[rank]
        if fused:
            communicator = FusedCommunicator(communicator, device)
        results = []
        for start in range(0, len(program), 6):
            works = []
            with communicator.group():
                for operation, everyone in program[start : start + 6]:
                    tensor = device.to_chip(everyone[rank])
                    work, result = submit(communicator, device, operation, tensor, size)
                    works.append(work)
                    results.append(result)
            for work in works:
                work.wait()
        return [device.to_host(result) for result in results]

    for rank, results in enumerate(ranks.together(run)):
        for (operation, everyone), result in zip(program, results, strict=True):
            expected = {
                "all_reduce": lambda parts: parts.sum(0),
                "all_gather": lambda parts: parts,
                "reduce_scatter": lambda parts, rank=rank: parts.sum(0)[rank],
                "broadcast": lambda parts: parts[size - 1],
            }[operation](everyone)
            assert torch.equal(result, expected), operation


def random_program(world_size, seed, steps):
    """(operation, everyone's tensor) in one order for all ranks, of sizes small and large."""
    generator = torch.Generator().manual_seed(seed)
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    program = []
    for _ in range(steps):
        operation = names[int(torch.randint(0, 4, (1,), generator=generator))]
        length = (1, 3, 500, 512, 4099, 20_000)[int(torch.randint(0, 6, (1,), generator=generator))]
        shape = (world_size, length) if operation == "reduce_scatter" else (length,)
        everyone = torch.randint(-9, 10, (world_size, *shape), generator=generator)
        program.append((operation, everyone.float()))
    return program


def submit(communicator, device, operation, tensor, world_size):
    """The work, and the tensor that its result will be in."""
    if operation == "all_gather":
        output = device.allocate((world_size, *tensor.shape), tensor.dtype)
        return communicator.all_gather(tensor, output), output
    if operation == "reduce_scatter":
        output = device.allocate(tensor.shape[1:], tensor.dtype)
        return communicator.reduce_scatter(tensor, output), output
    if operation == "broadcast":
        return communicator.broadcast(tensor, world_size - 1), tensor
    return communicator.all_reduce(tensor), tensor


@pytest.mark.covers("all_reduce", dtype="float32")
def test_done_turns_true_without_a_wait(ranks):
    def run(rank):
        tensor = ranks.devices[rank].to_chip(torch.ones(4))
        work = ranks.communicators[rank].all_reduce(tensor)
        give_up = time.monotonic() + 10.0
        while not work.done():
            assert time.monotonic() < give_up
            time.sleep(0.001)
        assert work.exception() is None
        work.wait()
        return ranks.devices[rank].to_host(tensor).tolist()

    assert ranks.together(run) == [[float(ranks.world_size)] * 4] * ranks.world_size


# ---------------------------------------------------------------- misuse


def test_after_close_and_abort_nothing_is_accepted(ranks):
    first, second = ranks.communicators[:2]
    ranks.on(0, first.close)
    ranks.on(1, second.abort)
    for rank, communicator in enumerate((first, second)):
        tensor = ranks.devices[rank].to_chip(torch.zeros(4))
        with pytest.raises(CommunicatorError):
            ranks.on(rank, partial(waited, communicator.all_reduce, tensor))


def waited(operation, *arguments, timeout_s=None):
    """Some communicators fail where they are asked, some where they are waited for."""
    operation(*arguments).wait(timeout_s)


def test_a_rank_that_does_not_exist_is_named(ranks):
    communicator, tensor = ranks.communicators[0], ranks.devices[0].to_chip(torch.zeros(4))
    nobody = ranks.world_size
    with pytest.raises(CommunicatorError, match=f"rank {nobody}"):
        ranks.on(0, lambda: communicator.send(tensor, nobody))
    with pytest.raises(CommunicatorError, match="rank 0"):
        ranks.on(0, lambda: communicator.receive(tensor, 0))


def test_a_rank_that_never_comes_costs_the_deadline(runtime, device):
    place = GroupPlace(rank=0, world_size=2, key="alone", join_deadline_s=0.5, step_deadline_s=0.5)
    started = time.monotonic()
    with pytest.raises(CommunicatorTimeout):
        runtime.create_communicator(device, place, runtime.open_rendezvous(place))
    assert time.monotonic() - started < BOUND_S


def test_a_group_of_one_needs_no_meeting_point(runtime, device):
    place = GroupPlace(rank=0, world_size=1, key="single", join_deadline_s=1.0, step_deadline_s=1.0)
    communicator = runtime.create_communicator(device, place, b"")
    tensor = device.to_chip(torch.arange(3.0))
    gathered = device.to_chip(torch.zeros(1, 3))
    part = device.to_chip(torch.zeros(3))
    communicator.all_reduce(tensor).wait()
    communicator.all_gather(tensor, gathered).wait()
    communicator.reduce_scatter(gathered, part).wait()
    communicator.broadcast(tensor, 0).wait()
    assert device.to_host(tensor).tolist() == [0.0, 1.0, 2.0]
    assert device.to_host(gathered).tolist() == [[0.0, 1.0, 2.0]]
    assert device.to_host(part).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CommunicatorError, match="group of one"):
        communicator.send(tensor, 1)


# ---------------------------------------------------------------- ranks in trouble


@pytest.fixture
def two_ranks(backend_name, backend_options, device):  # noqa: ARG001 - as it was, at the end
    """A deadline of half a second for each operation."""
    pair = LocalRanks(backend_name, 2, backend_options)
    pair.form(step_deadline_s=SHORT_S)
    yield pair
    pair.close()


@pytest.mark.covers("all_reduce", dtype="float32")
def test_an_operation_ends_at_the_groups_deadline_without_being_asked(two_ranks):
    tensor, works = two_ranks.devices[0].to_chip(torch.zeros(4)), []

    def run():
        works.append(two_ranks.communicators[0].all_reduce(tensor))
        works[0].wait()

    started = time.monotonic()
    with pytest.raises(CommunicatorTimeout):
        two_ranks.on(0, run)
    assert time.monotonic() - started < BOUND_S
    # Of one that finishes before it returns there is no work.
    for work in works:
        assert isinstance(work.exception(), CommunicatorTimeout)
        assert work.done()


@pytest.mark.covers("receive", "all_reduce", dtype="float32")
def test_a_shorter_wait_costs_the_communicator_too(two_ranks):
    first, second = two_ranks.communicators
    mine, other = (device.to_chip(torch.zeros(4)) for device in two_ranks.devices)
    with pytest.raises(CommunicatorTimeout):
        two_ranks.on(0, lambda: waited(first.receive, mine, 1, timeout_s=0.1))
    with pytest.raises(CommunicatorError):
        two_ranks.on(0, lambda: waited(first.all_reduce, mine))
    with pytest.raises((PeerLost, CommunicatorTimeout)):
        two_ranks.on(1, lambda: waited(second.all_reduce, other))


@pytest.mark.covers("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "receive")
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_all_operations_between_processes(start_ranks, world_size):
    ranks = start_ranks("operations", world_size)
    assert len({ranks.record(rank)["crc"] for rank in range(world_size)}) == 1
