"""Collectives within captured programs: no Python between, and the same results and errors."""

import random
import signal
import threading
import time

import pytest
import torch

from backends.cpu.native_kernels import NativeKernels
from backends.cpu.plugin import CpuBackend
from backends.cpu.shared_memory_end import SharedMemorySettings
from backends.cpu.shared_memory_library import LIBRARY_PATH
from backends.errors import CommunicatorError, CommunicatorMisuse, CommunicatorTimeout, PeerLost
from backends.interface import BackendConfig, open_runtime
from tests.fakes.rank_threads import run_ranks
from tests.fakes.shared_memory_ranks import open_communicators

HIDDEN, VOCABULARY, LAYERS = 96, 70, 5
SMALL = SharedMemorySettings(buffer_bytes=4096, rings_bytes=0)
BOUND_S = 15.0

pytestmark = pytest.mark.skipif(
    not LIBRARY_PATH.exists(), reason="no compiler: scripts/setup built no native collectives"
)


class Rank:
    """A chip that multiplies with matrices of its own and adds what the others get."""

    def __init__(self, communicator):
        config = BackendConfig(chip_indices=(0,), dtype="float32")
        (self.device,) = open_runtime(CpuBackend(), config).acquire(1).granted
        if not self.device.captures_steps:
            pytest.skip("the native kernels are not built")
        self.communicator = communicator
        self.kernels = NativeKernels(self.device._engine, None)
        generator = torch.Generator().manual_seed(communicator.rank)
        self.table, self.weight = (
            self.device.to_matrix(torch.randn(rows, HIDDEN, generator=generator))
            for rows in (VOCABULARY, HIDDEN)
        )
        self.norm = torch.ones(HIDDEN)
        self.summed_from_python = 0
        self.delay_s = 0.0
        self.programs = {}

    def forward(self, ids):
        hidden = self.summed(self.kernels.embedding(ids, self.table, 0, 1.0))
        for layer in range(LAYERS):
            if layer == LAYERS // 2:
                self.device.in_order(self.dawdle)
            hidden = self.kernels.rms_norm(hidden, self.norm, 1e-5)
            hidden = self.summed(self.kernels.linear(hidden, self.weight, None, None))
        return hidden

    def summed(self, part):
        self.device.in_order(self.sum_from_python, part, native=self.communicator.native_all_reduce)
        return part

    def sum_from_python(self, part):
        self.summed_from_python += 1
        self.communicator.all_reduce(part).wait()

    def dawdle(self):
        time.sleep(self.delay_s)

    def replay(self, tokens, seed=0):
        if tokens not in self.programs:
            ids = torch.zeros(tokens, dtype=torch.int64)
            results = []
            program = self.device.capture(lambda: results.append(self.forward(ids)))
            self.programs[tokens] = ids, program, results
        ids, program, results = self.programs[tokens]
        ids.copy_(ids_of(tokens, seed))
        program.replay()
        return results[0].clone()


def ids_of(tokens, seed):
    return torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ranks():
    """Makes the ranks of a group, in one process."""
    opened = []

    def open_ranks(world_size=2, deadline_s=BOUND_S):
        opened.extend(map(Rank, open_communicators(world_size, deadline_s, SMALL)))
        return opened

    yield open_ranks
    for rank in opened:
        rank.communicator.close()
        rank.device.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_replays_give_the_bits_of_the_operations_whoever_is_late(ranks, world_size):
    """Programs in any order, sums below and above a buffer, a rank late before and within."""
    opened = ranks(world_size)
    choose = random.Random(world_size)
    schedule = [(choose.choice([1, 2, 7, 33]), seed) for seed in range(25)]
    late = [choose.choice([None, *range(world_size)]) for _ in schedule]

    def replay_all(rank):
        found = []
        for (tokens, seed), slow in zip(schedule, late, strict=True):
            rank.delay_s = 0.002 if slow == rank.communicator.rank else 0.0
            rank.dawdle()
            found.append(rank.replay(tokens, seed))
        return found

    def compute_all(rank):
        return [rank.forward(ids_of(tokens, seed)) for tokens, seed in schedule]

    replayed = run_ranks([lambda rank=rank: replay_all(rank) for rank in opened])
    assert [rank.summed_from_python for rank in opened] == [0] * world_size
    computed = run_ranks([lambda rank=rank: compute_all(rank) for rank in opened])
    for found in replayed:
        assert all(map(torch.equal, found, computed[0]))


def test_python_runs_beside_a_replay_and_may_abort_it(ranks):
    first, second = ranks()
    timer = threading.Timer(0.1, first.communicator.abort)
    timer.start()
    with pytest.raises(CommunicatorError, match="all_reduce: aborted"):
        first.replay(2)
    timer.join()
    with pytest.raises(CommunicatorError, match="all_reduce: the communicator is closed or broken"):
        first.replay(2)
    with pytest.raises(PeerLost, match="all_reduce: rank 0 aborted"):
        second.replay(2)


def test_a_rank_that_leaves_in_the_middle_is_lost_to_the_others(ranks):
    first, second = ranks()
    second.dawdle = second.communicator.close

    def replay(rank):
        with pytest.raises(CommunicatorError) as raised:
            rank.replay(7)
        return raised.value

    lost, closed = run_ranks([lambda rank=rank: replay(rank) for rank in (first, second)])
    assert isinstance(lost, PeerLost)
    assert str(lost) == "all_reduce: rank 1 left"
    assert "closed or broken" in str(closed)


def test_a_rank_that_does_not_come_costs_the_deadline_and_the_wait_is_counted(ranks):
    first, _ = ranks(deadline_s=0.2)
    with pytest.raises(CommunicatorTimeout, match=r"all_reduce: not done after .*rank 1 did not"):
        first.replay(1)
    assert first.communicator.native_calls_ns >= 0.2e9


def test_ranks_that_replay_different_programs_all_hear_of_it(ranks):
    opened = ranks()

    def replay(rank):
        with pytest.raises(CommunicatorMisuse, match="all_reduce") as raised:
            rank.replay(1 + rank.communicator.rank)
        return str(raised.value)

    texts = run_ranks([lambda rank=rank: replay(rank) for rank in opened])
    assert any(f"called all_reduce of {4 * HIDDEN} bytes" in text for text in texts), texts


def test_a_signal_is_handled_in_a_wait_and_the_replay_goes_on(ranks):
    """The other rank comes only once the handler has run."""
    first, second = ranks()
    handled = threading.Event()
    results = []

    def come():
        assert handled.wait(BOUND_S)
        results.append(second.replay(7, seed=3))

    before = signal.signal(signal.SIGALRM, lambda *_: handled.set())
    other = threading.Thread(target=come)
    other.start()
    # Again and again: one signal may come before the wait begins.
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        mine = first.replay(7, seed=3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        other.join()
    assert handled.is_set()
    assert torch.equal(mine, results[0])


def test_an_interrupted_replay_leaves_nothing_under_way(ranks):
    """What the sum works on may be gone once nobody keeps the program."""
    first, second = ranks()
    run_ranks([lambda rank=rank: rank.replay(7) for rank in (first, second)])
    end = first.communicator._end
    program = first.programs[7][1]
    calls = [call for part in program._parts for call in getattr(part, "_calls", ())]

    def interrupt(*_):
        if not all(end.finished(call._call.number) for call in calls):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # Again and again: one signal may come before the wait begins.
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            first.replay(7)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(PeerLost, match="all_reduce: rank 0 aborted"):
        second.replay(7)


def test_an_interrupt_in_a_submission_leaves_nothing_under_way(ranks):
    """The tensor would not be held yet."""
    first, second = ranks()
    # More than a buffer takes: the sum needs both ranks to the end.
    parts = torch.ones(4 * SMALL.buffer_bytes), torch.ones(4 * SMALL.buffer_bytes)
    end, submit = first.communicator._end, first.communicator._end._submit

    def interrupted(*arguments):
        submit(*arguments)
        raise KeyboardInterrupt

    end._submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.communicator.all_reduce(parts[0])
    with pytest.raises(PeerLost, match="all_reduce: rank 0 aborted"):
        second.communicator.all_reduce(parts[1]).wait()
