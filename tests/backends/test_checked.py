"""Ranks that call different operations hear of it in words, and before anything hangs or sums."""

from contextlib import suppress

import pytest
import torch

from backends.checked import CheckedCommunicator
from backends.errors import CommunicatorError, CommunicatorMisuse
from backends.fusion import FusedCommunicator
from tests.backends.collective_program import CollectiveProgram


@pytest.fixture
def checked(ranks):
    ranks.form()
    yield [
        CheckedCommunicator(communicator, device)
        for communicator, device in zip(ranks.communicators, ranks.devices, strict=True)
    ]
    ranks.leave()


def chip(ranks, rank, *shape, dtype=torch.float32):
    return ranks.devices[rank].to_chip(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("seed", range(2))
def test_right_calls_have_the_results_they_have_unchecked(ranks, checked, seed):
    program = CollectiveProgram(seed, ranks.world_size)
    found = ranks.together(lambda rank: program.run(checked[rank], ranks.devices[rank]))
    ranks.form()
    plain = ranks.together(lambda rank: program.run(ranks.communicators[rank], ranks.devices[rank]))
    for checked_results, results in zip(found, plain, strict=True):
        assert all(map(torch.equal, checked_results, results))


def test_fused_calls_are_checked_as_they_are_made(ranks):
    ranks.form()
    composed = [
        FusedCommunicator(CheckedCommunicator(communicator, device), device)
        for communicator, device in zip(ranks.communicators, ranks.devices, strict=True)
    ]

    def work(rank):
        with composed[rank].group():
            composed[rank].all_reduce(chip(ranks, rank, 3))
            # One tensor less on rank 0: alone it would be a sum of the wrong length.
            if rank > 0:
                composed[rank].all_reduce(chip(ranks, rank, 4))

    with pytest.raises(CommunicatorMisuse, match=r"rank 0: .* 3 elements.*: .* 7 elements"):
        ranks.together(work)


WRONG = {
    "operation": (
        lambda c, t: c.all_reduce(t(4)),
        lambda c, t: c.broadcast(t(4), root=1),
        "rank 0: call 1, all_reduce of 4 elements of float32",
        ": call 1, broadcast from rank 1 of 4 elements of float32",
    ),
    "elements": (
        lambda c, t: c.all_reduce(t(4)),
        lambda c, t: c.all_reduce(t(2, 3)),
        "rank 0: call 1, all_reduce of 4 elements of float32",
        ": call 1, all_reduce of 6 elements of float32",
    ),
    "dtype": (
        lambda c, t: c.all_reduce(t(4)),
        lambda c, t: c.all_reduce(t(4, dtype=torch.int64)),
        "rank 0: call 1, all_reduce of 4 elements of float32",
        ": call 1, all_reduce of 4 elements of int64",
    ),
    "root": (
        lambda c, t: c.broadcast(t(4), root=0),
        lambda c, t: c.broadcast(t(4), root=1),
        "rank 0: call 1, broadcast from rank 0 of 4 elements of float32",
        ": call 1, broadcast from rank 1 of 4 elements of float32",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_every_rank_is_told_who_calls_what(ranks, checked, case):
    first, others, says, says_too = WRONG[case]

    def work(rank):
        def tensor(*shape, dtype=torch.float32):
            return chip(ranks, rank, *shape, dtype=dtype)

        checked[rank].all_reduce(tensor(4)).wait(10.0)
        with pytest.raises(CommunicatorMisuse) as raised:
            (first if rank == 0 else others)(checked[rank], tensor)
        return str(raised.value)

    messages = set(ranks.together(work))
    assert len(messages) == 1, "the same on every rank"
    (message,) = messages
    assert says in message
    others_named = "rank 1" if ranks.world_size == 2 else "ranks 1, 2"
    assert others_named + says_too in message


def test_a_message_of_another_length_is_refused_by_its_receiver(ranks):
    ranks.form(step_deadline_s=1.0)
    checked = [
        CheckedCommunicator(communicator, device)
        for communicator, device in zip(ranks.communicators, ranks.devices, strict=True)
    ]
    sent = []

    def work(rank):
        if rank == 0:
            # Nobody takes the message that follows the fingerprint, which may end a blocking send.
            with suppress(CommunicatorError):
                sent.append(checked[0].send(chip(ranks, 0, 3), 1))
        if rank != 1:
            return ""
        received = checked[1].receive(chip(ranks, 1, 5), 0)
        with pytest.raises(CommunicatorMisuse) as raised:
            received.wait(10.0)
        assert received.done()
        assert received.exception() is raised.value
        return str(raised.value)

    message = ranks.together(work)[1]
    assert message == (
        "rank 0 sends call 0, message of 3 elements of float32; "
        "rank 1 awaits call 0, message of 5 elements of float32"
    )


def test_messages_keep_their_order_whichever_is_waited_for_first(ranks, checked):
    def work(rank):
        device = ranks.devices[rank]
        if rank == 0:
            works = [checked[0].send(device.to_chip(torch.full((4,), i)), 1) for i in range(3)]
            for each in works:
                each.wait(10.0)
        if rank != 1:
            return []
        got = [device.allocate((4,), torch.int64) for _ in range(3)]
        works = [checked[1].receive(tensor, 0) for tensor in got]
        for each in reversed(works):
            each.wait_stream()
        return [device.to_host(tensor)[0].item() for tensor in got]

    assert ranks.together(work)[1] == [0, 1, 2]


def test_a_receive_can_be_polled(ranks, checked):
    def work(rank):
        if rank == 0:
            checked[0].send(chip(ranks, 0, 4), 1).wait(10.0)
        if rank == 1:
            received = checked[1].receive(chip(ranks, 1, 4), 0)
            while not received.done():
                pass
            assert received.exception() is None

    ranks.together(work)
