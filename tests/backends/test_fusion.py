"""Small messages inside `group()` travel as one, with the results they would have apart."""

import json

import pytest
import torch

from backends.errors import CommunicatorError
from backends.fusion import FusedCommunicator, compose
from backends.interface import SingleRankCommunicator
from tests.backends.collective_program import CollectiveProgram, own
from tests.backends.rank_processes import RankProcesses
from tests.fakes.counting_communicator import CountingCommunicator

MESSAGE_BYTES_MAX = 4096
BUFFER_BYTES = 16384
TRIES_MAX = 3
"""A disturbed machine is slower at what takes longer in one go."""


@pytest.fixture
def fused(ranks):
    """One fused communicator a rank, over one that counts."""
    ranks.form()
    yield [
        FusedCommunicator(
            CountingCommunicator(communicator), device, MESSAGE_BYTES_MAX, BUFFER_BYTES
        )
        for communicator, device in zip(ranks.communicators, ranks.devices, strict=True)
    ]
    ranks.leave()


def calls_of(fused):
    return fused[0]._inner.calls


def summed(world_size, shape, seed=0):
    return sum(own(rank, shape, seed=seed).double() for rank in range(world_size))


def test_eight_small_sums_are_one_message(ranks, fused):
    shapes = [(1, 576), (3, 7), (0, 5), (1,), (2, 2, 2), (64,), (5, 5), (9,)]

    def work(rank):
        device, communicator = ranks.devices[rank], fused[rank]
        tensors = [device.to_chip(own(rank, s, seed=i)) for i, s in enumerate(shapes)]
        with communicator.group():
            works = [communicator.all_reduce(tensor) for tensor in tensors]
        for each in works:
            each.wait(10.0)
            assert each.done()
            assert each.exception() is None
        return [device.to_host(tensor) for tensor in tensors]

    for results in ranks.together(work):
        for index, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            torch.testing.assert_close(
                result.double(), summed(ranks.world_size, shape, index), rtol=1e-5, atol=1e-3
            )
    total = sum(torch.Size(shape).numel() for shape in shapes)
    assert calls_of(fused) == [f"all_reduce float32 {total}"]


@pytest.mark.parametrize("seed", range(6))
def test_a_random_program_has_the_results_of_its_calls_apart(ranks, fused, seed):
    program = CollectiveProgram(seed, ranks.world_size)
    found = ranks.together(lambda rank: program.run(fused[rank], ranks.devices[rank]))
    ranks.form()
    apart = ranks.together(lambda rank: program.run(ranks.communicators[rank], ranks.devices[rank]))
    for fused_results, results in zip(found, apart, strict=True):
        assert len(fused_results) == len(results)
        assert all(map(torch.equal, fused_results, results))


def in_group(ranks, fused, *submit):
    """Every rank submits the operations in one group; returns what rank 0's inner was asked."""

    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        with communicator.group():
            works = [each(communicator, device) for each in submit]
        for each in works:
            each.wait(10.0)

    ranks.together(work)
    return calls_of(fused)


def reduce(elements, dtype=torch.float32):
    return lambda c, d: c.all_reduce(d.to_chip(torch.ones(elements, dtype=dtype)))


def spread(elements, root):
    return lambda c, d: c.broadcast(d.to_chip(torch.ones(elements)), root)


def gather(elements):
    return lambda c, d: c.all_gather(
        d.to_chip(torch.ones(elements)), d.allocate((c.world_size, elements), torch.float32)
    )


def scatter(elements):
    return lambda c, d: c.reduce_scatter(
        d.to_chip(torch.ones(c.world_size, elements)), d.allocate((elements,), torch.float32)
    )


def test_only_neighbours_of_one_kind_are_fused_in_the_order_of_the_program(ranks, fused):
    calls = in_group(
        ranks,
        fused,
        reduce(3),
        reduce(4),
        reduce(5, torch.int64),
        spread(6, 0),
        spread(7, 0),
        spread(8, 1),
        gather(9),
        gather(10),
        scatter(11),
        scatter(12),
        reduce(13),
    )
    assert calls == [
        "all_reduce float32 7",
        "all_reduce int64 5",
        "broadcast float32 13 from 0",
        "broadcast float32 8 from 1",
        "all_gather float32 19",
        f"reduce_scatter float32 {23 * ranks.world_size}",
        "all_reduce float32 13",
    ]


def test_a_large_message_goes_as_it_is_and_divides_the_small_ones(ranks, fused):
    large = MESSAGE_BYTES_MAX // 4 + 1
    calls = in_group(ranks, fused, reduce(1), reduce(2), reduce(large), reduce(3), reduce(4))
    assert calls == ["all_reduce float32 3", f"all_reduce float32 {large}", "all_reduce float32 7"]


def test_messages_beyond_the_buffer_begin_another(ranks, fused):
    elements = MESSAGE_BYTES_MAX // 4
    calls = in_group(ranks, fused, *[reduce(elements)] * 7)
    assert sum(int(call.split()[2]) for call in calls) == 7 * elements
    assert 1 < len(calls) <= 4


def test_outside_a_group_nothing_is_recorded(ranks, fused):
    def work(rank):
        fused[rank].all_reduce(ranks.devices[rank].to_chip(torch.ones(3))).wait(10.0)
        fused[rank].all_reduce(ranks.devices[rank].to_chip(torch.ones(4))).wait(10.0)

    ranks.together(work)
    assert calls_of(fused) == ["all_reduce float32 3", "all_reduce float32 4"]


def test_a_group_in_a_group_is_one(ranks, fused):
    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        with communicator.group():
            reduce(3)(communicator, device)
            with communicator.group():
                reduce(4)(communicator, device)
            assert communicator._inner.calls == []
            reduce(5)(communicator, device)

    ranks.together(work)
    assert calls_of(fused) == ["all_reduce float32 12"]


@pytest.mark.parametrize("wait", ["wait", "wait_stream"])
def test_waiting_inside_a_group_submits_what_is_recorded(ranks, fused, wait):
    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        tensors = [device.to_chip(own(rank, (4,), seed=i)) for i in range(3)]
        with communicator.group():
            first, second = (communicator.all_reduce(tensor) for tensor in tensors[:2])
            assert not first.done()
            assert first.exception() is None
            assert communicator._inner.calls == [], "asking submits nothing"
            getattr(second, wait)()
            results = [device.to_host(tensor) for tensor in tensors[1:2]]
            last = communicator.all_reduce(tensors[2])
        first.wait_stream()
        last.wait_stream()
        return [device.to_host(tensors[0]), *results, device.to_host(tensors[2])]

    for results in ranks.together(work):
        for index, result in enumerate(results):
            expected = summed(ranks.world_size, (4,), index)
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-3)
    assert calls_of(fused) == ["all_reduce float32 8", "all_reduce float32 4"]


def test_an_error_in_a_group_drops_what_was_not_submitted(ranks, fused):
    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        works = []

        def fail_in_group():
            with communicator.group():
                works.append(reduce(3)(communicator, device))
                works[0].wait_stream()
                works.append(spread(4, 0)(communicator, device))
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fail_in_group()
        works[0].wait(10.0)
        assert works[1].done()
        assert isinstance(works[1].exception(), CommunicatorError)
        for wait in (works[1].wait, works[1].wait_stream):
            with pytest.raises(CommunicatorError, match="group ended with an error"):
                wait()
        # Nothing of it is left for the next group.
        with communicator.group():
            reduce(5)(communicator, device)

    ranks.together(work)
    assert calls_of(fused) == ["all_reduce float32 3", "all_reduce float32 5"]


class BrokenCommunicator(CountingCommunicator):
    """Its broadcasts fail."""

    def broadcast(self, tensor, root):
        raise CommunicatorError(f"the link is down for {tensor.numel()} elements from {root}")


def test_what_a_failed_submission_did_not_reach_has_failed_with_it(device):
    fused = FusedCommunicator(BrokenCommunicator(SingleRankCommunicator()), device)
    works = []

    def fail_in_group():
        with fused.group():
            works.extend(each(fused, device) for each in (reduce(3), spread(4, 0), reduce(5)))

    with pytest.raises(CommunicatorError, match="the link is down"):
        fail_in_group()
    assert [work.done() for work in works] == [True, True, True]
    assert works[0].exception() is None
    for work in works[1:]:
        assert "the link is down" in str(work.exception())
        with pytest.raises(CommunicatorError, match="the link is down"):
            work.wait(1.0)


def test_a_tensor_used_again_in_a_group_sees_the_first_result(ranks, fused):
    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        tensors = [device.to_chip(torch.ones(8)), device.to_chip(torch.ones(8))]
        gathered = device.allocate((communicator.world_size, 4), torch.float32)
        with communicator.group():
            works = [communicator.all_reduce(tensor) for tensor in tensors]
            works.append(communicator.all_reduce(tensors[0][4:]))
            works.append(communicator.all_gather(tensors[0][2:6], gathered))
        for each in works:
            each.wait(10.0)
        return device.to_host(tensors[0]), device.to_host(gathered)

    size = ranks.world_size
    for reduced, gathered in ranks.together(work):
        assert reduced.tolist() == [size] * 4 + [size**2] * 4
        assert gathered.tolist() == [[size, size, size**2, size**2]] * size


def test_messages_between_two_ranks_are_fused_whatever_else_each_says_meanwhile(ranks, fused):
    """Rank 0 answers between its messages, rank 1 collects: both must fuse alike."""

    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        with communicator.group():
            if rank == 0:
                sent = [device.to_chip(torch.full((3,), float(i))) for i in range(3)]
                got = [device.allocate((3,), torch.float32) for _ in range(3)]
                works = []
                for outgoing, incoming in zip(sent, got, strict=True):
                    works.append(communicator.send(outgoing, 1))
                    works.append(communicator.receive(incoming, 1))
            elif rank == 1:
                got = [device.allocate((3,), torch.float32) for _ in range(3)]
                works = [communicator.receive(incoming, 0) for incoming in got]
                works += [
                    communicator.send(device.to_chip(torch.full((3,), 10.0 + i)), 0)
                    for i in range(3)
                ]
            else:
                return []
        for each in works:
            each.wait(10.0)
        return [device.to_host(tensor).tolist() for tensor in got]

    first, second = ranks.together(work)[:2]
    assert second == [[float(i)] * 3 for i in range(3)]
    assert first == [[10.0 + i] * 3 for i in range(3)]
    assert calls_of(fused) == ["send float32 9 to 1", "receive float32 9 from 1"]


def test_groups_one_after_another_share_one_buffer(ranks, fused):
    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        before = device.scratch.bytes_by_operation().get("fused_messages", 0)
        for size in range(1, 30):
            with communicator.group():
                works = [reduce(size + i)(communicator, device) for i in range(3)]
            for each in works:
                each.wait_stream()
        return device.scratch.bytes_by_operation()["fused_messages"] - before

    assert ranks.together(work) == [BUFFER_BYTES] * ranks.world_size


def test_sent_messages_nobody_waits_for_give_their_buffer_back(ranks, fused):
    def work(rank):
        communicator, device = fused[rank], ranks.devices[rank]
        if rank > 1:
            return 0
        before = device.scratch.bytes_by_operation().get("fused_messages", 0)
        for _ in range(20):
            with communicator.group():
                for _ in range(2):
                    if rank == 0:
                        communicator.send(device.to_chip(torch.ones(2)), 1)
                    else:
                        work = communicator.receive(device.to_chip(torch.ones(2)), 0)
            if rank == 1:
                work.wait(10.0)
                communicator.send(device.to_chip(torch.ones(1)), 0).wait(10.0)
            else:
                communicator.receive(device.to_chip(torch.ones(1)), 1).wait(10.0)
        return device.scratch.bytes_by_operation()["fused_messages"] - before

    assert max(ranks.together(work)) <= 3 * BUFFER_BYTES


@pytest.mark.long
@pytest.mark.parametrize("collectives", ["gloo", "auto"])
def test_eight_messages_of_2_kb_cost_less_than_half_in_a_group(backend_name, collectives, tmp_path):
    """Wants a quiet machine: between processes, medians of interleaved runs."""
    if backend_name != "cpu" and collectives != "auto":
        pytest.skip("the backend has one kind of collectives")
    options = json.dumps({"collectives": collectives} if backend_name == "cpu" else {})
    tries = []
    while len(tries) < TRIES_MAX and not any(
        each["together"] < each["apart"] / 2 for each in tries
    ):
        processes = RankProcesses(backend_name, options, "fusing", 2, tmp_path)
        try:
            tries.append(processes.record(0))
            processes.record(1)
        finally:
            processes.kill()
    assert tries[-1]["together"] < tries[-1]["apart"] / 2, tries


def test_a_link_on_which_a_message_costs_next_to_nothing_is_left_alone(ranks):
    ranks.form()
    for raw, device in zip(ranks.communicators, ranks.devices, strict=True):
        fused = isinstance(compose(raw, device, checked=False), FusedCommunicator)
        assert fused == (raw.fused_bytes_max > 0)


def test_no_message_is_packed_that_is_larger_than_the_link_declares(device):
    class Declaring(CountingCommunicator):
        fused_bytes_max = 16

        def __init__(self):
            super().__init__(SingleRankCommunicator())
            self.world_size = 2

    raw = Declaring()
    communicator = compose(raw, device, checked=False)
    with communicator.group():
        for elements in (2, 2, 5, 5):
            communicator.all_reduce(device.to_chip(torch.ones(elements)))
    assert raw.calls == ["all_reduce float32 4", "all_reduce float32 5", "all_reduce float32 5"]


def test_a_group_of_one_is_left_alone(device):
    alone = SingleRankCommunicator()
    assert compose(alone, device, checked=True) is alone
