"""The cpu backend's collectives through shared memory: waits, failures, misuse, what is left."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from backends.cpu.plugin import CpuBackend
from backends.cpu.runtime import CpuRuntime
from backends.cpu.shared_memory_end import SharedMemorySettings
from backends.cpu.shared_memory_join import Refusal, join_shared_memory
from backends.cpu.shared_memory_library import LIBRARY_PATH, SUM_TYPES, Library
from backends.cpu.shared_memory_segment import FOLDER, Segment
from backends.errors import (
    BackendUnavailable,
    CommunicatorError,
    CommunicatorMisuse,
    CommunicatorTimeout,
    PeerLost,
)
from backends.gloo_rendezvous import GlooRendezvous
from backends.interface import BackendConfig, GroupPlace
from tests.fakes.shared_memory_ranks import BOUND_S, SMALL, SharedMemoryRanks

ROOT = Path(__file__).parents[2]
STRESS = Path(__file__).with_name("collective_stress.py")

pytestmark = pytest.mark.skipif(
    not LIBRARY_PATH.exists(), reason="no compiler: scripts/setup built no native collectives"
)


@pytest.fixture
def ranks():
    with closing(SharedMemoryRanks()) as opened:
        yield opened


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("dtype", list(SUM_TYPES), ids=str)
def test_every_dtype_is_summed_in_the_order_of_the_ranks(ranks, dtype):
    """Integers wrap around, half precision is rounded once, what is not a number stays so."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn((3, 3000), generator=generator) * 100
    everyone = wide.abs().to(dtype) if dtype in (torch.uint8, torch.bool) else wide.to(dtype)
    if dtype.is_floating_point:
        everyone[1, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")], dtype=dtype)
        everyone[2, 0] = float("-inf")
    exact = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    expected = everyone[0].to(exact)
    for other in everyone[1:]:
        expected = expected + other.to(exact)
    ranks.form(3)

    def run(communicator):
        tensor = everyone[communicator.rank].clone()
        communicator.all_reduce(tensor).wait()
        return tensor

    expected = expected.to(dtype)
    for result in ranks.together(run):
        assert bool(((result == expected) | (result.isnan() & expected.isnan())).all())


def test_a_dtype_without_a_sum_is_refused_and_moved(ranks):
    ranks.form()

    def run(communicator):
        tensor = torch.full((5,), float(communicator.rank)).to(torch.float8_e4m3fn)
        with pytest.raises(CommunicatorError, match=r"float8_e4m3fn cannot be summed.*bfloat16"):
            communicator.all_reduce(tensor)
        communicator.broadcast(tensor, 1).wait()
        return tensor.float().tolist()

    assert ranks.together(run) == [[1.0] * 5] * 2


def test_sixty_four_ranks(ranks):
    ranks.form(64, settings=SharedMemorySettings())

    def run(communicator):
        tensor, output = torch.full((70,), communicator.rank), torch.zeros(3)
        communicator.all_reduce(tensor).wait()
        communicator.reduce_scatter(torch.ones(64, 3) * communicator.rank, output).wait()
        return tensor.unique().tolist() + output.tolist()

    assert ranks.together(run) == [[2016, 2016.0, 2016.0, 2016.0]] * 64


@pytest.mark.parametrize(("world_size", "size_max"), [(2, 5 << 20), (8, 11 << 20), (64, 26 << 20)])
def test_a_segment_is_of_bounded_size(world_size, size_max):
    geometry = SharedMemorySettings().geometry(world_size)
    assert Library().segment_bytes_for(geometry) < size_max


def test_many_operations_of_all_kinds_are_under_way_at_once(ranks):
    """More than there are buffers, most larger than one, waited for from the last to the first."""
    ranks.form(2)
    count = 20

    def run(communicator):
        rank, other = communicator.rank, 1 - communicator.rank
        works, results = [], []
        for number in range(count):
            total, root = torch.full((2000,), number + rank), torch.full((700,), number + rank)
            gathered, received = torch.zeros((2, 900), dtype=torch.int64), torch.zeros(1500)
            works += [
                communicator.send(torch.full((1500,), float(number + rank)), other),
                communicator.all_reduce(total),
                communicator.all_gather(torch.full((900,), number + rank), gathered),
                communicator.broadcast(root, 1),
                communicator.receive(received, other),
            ]
            results.append((total, root, gathered[0], gathered[1], received))
        for work in reversed(works):
            work.wait()
        return [[each.unique().tolist() for each in result] for result in results]

    for rank, results in enumerate(ranks.together(run)):
        for number, result in enumerate(results):
            expected = [2 * number + 1, number + 1, number, number + 1, number + 1 - rank]
            assert result == [[each] for each in expected]


def test_small_messages_need_no_receiver_and_large_ones_block_in_the_wait_only(ranks):
    first, second = ranks.form()
    first.send(torch.ones(10), 1).wait()
    first.send(torch.ones(20), 1).wait()
    large = first.send(torch.ones(100_000), 1)
    assert not large.done()
    for length in (10, 20):
        received = torch.zeros(length)
        second.receive(received, 0).wait()
        assert received.tolist() == [1.0] * length
    received = torch.zeros(100_000)
    work = second.receive(received, 0)
    give_up = time.monotonic() + BOUND_S
    while not (large.done() & work.done()):
        assert time.monotonic() < give_up
    assert bool((received == 1.0).all())


def test_a_work_nobody_keeps_still_holds_its_tensors(ranks):
    """The tensor is read and written after submission; nobody but the communicator knows it."""
    first, second = ranks.form()
    first.all_reduce(torch.ones(50_000))
    others = [torch.full((50_000,), 7.0) for _ in range(4)]
    mine = torch.ones(50_000)
    work = second.all_reduce(mine)
    give_up = time.monotonic() + BOUND_S
    while not work.done():  # the beating thread of the first rank goes on for it
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert mine.unique().tolist() == [2.0]
    assert [other.unique().tolist() for other in others] == [[7.0]] * 4


# ---------------------------------------------------------------- failures


def test_abort_ends_a_wait_at_once_and_the_other_ranks_lose_this_one(ranks):
    first, second = ranks.form()
    work = first.all_reduce(torch.zeros(4))
    timer = threading.Timer(0.1, first.abort)
    timer.start()
    started = time.monotonic()
    with pytest.raises(CommunicatorError, match="all_reduce: aborted"):
        work.wait()
    assert time.monotonic() - started < BOUND_S / 2
    timer.join()
    with pytest.raises(CommunicatorError, match="closed or broken"):
        first.all_reduce(torch.zeros(4))
    with pytest.raises(PeerLost, match="rank 0 aborted"):
        second.receive(torch.zeros(4), 0).wait()


def test_what_a_rank_did_before_it_left_still_counts(ranks):
    first, second = ranks.form()
    first.send(torch.ones(3), 1).wait()
    first.broadcast(torch.ones(2), 0).wait()
    first.close()
    message, root = torch.zeros(3), torch.zeros(2)
    second.receive(message, 0).wait()
    second.broadcast(root, 0).wait()
    assert message.tolist() + root.tolist() == [1.0] * 5
    with pytest.raises(PeerLost, match="rank 0 left"):
        second.all_reduce(torch.zeros(1)).wait()


def test_a_timeout_names_the_ranks_that_did_not_come(ranks):
    first, second, *_ = ranks.form(4)
    second.all_reduce(torch.zeros(4))
    with pytest.raises(CommunicatorTimeout, match=r"not done after 0\.0\d\d s: ranks 2, 3 did not"):
        first.all_reduce(torch.zeros(4)).wait(timeout_s=0.02)
    with pytest.raises(CommunicatorTimeout, match="rank 3 did not come"):
        ranks.communicators[2].receive(torch.zeros(4), 3).wait(timeout_s=0.02)


def test_an_operation_fails_at_its_deadline_though_nobody_waits(ranks):
    first, second = ranks.form(deadline_s=0.1)
    work = first.receive(torch.zeros(4), 1)
    assert work.exception() is None
    time.sleep(0.3)
    with pytest.raises(PeerLost, match="rank 0 left after it had waited in vain"):
        second.receive(torch.zeros(4), 0).wait()
    assert isinstance(work.exception(), CommunicatorTimeout)
    assert work.done()


def test_a_rank_that_lost_another_one_says_whom(ranks):
    first, second, third = ranks.form(3)
    third.close()
    with pytest.raises(PeerLost, match="rank 2 left"):
        second.receive(torch.zeros(1), 2).wait()
    with pytest.raises(PeerLost, match="rank 1 left because it lost rank 2"):
        first.receive(torch.zeros(1), 1).wait()


def test_the_last_to_forget_a_communicator_ends_it(ranks):
    """Nobody closed it: the other rank must hear of it, and the memory must go with the last."""
    first, second = ranks.form()
    name = first._end._segment.path.name
    ranks.communicators.clear()
    del first
    with pytest.raises(PeerLost, match="rank 0 left"):
        second.receive(torch.zeros(1), 0).wait()
    assert name in Path("/proc/self/maps").read_text()
    del second
    gc.collect()  # the error that was raised held it too
    assert name not in Path("/proc/self/maps").read_text()


# ---------------------------------------------------------------- misuse


def of(name, *shape, dtype=torch.float32, **options):
    """A call for one rank of two."""

    def call(communicator):
        tensor = torch.zeros(shape, dtype=dtype)
        if name == "all_gather":
            return communicator.all_gather(tensor, torch.zeros((2, *shape), dtype=dtype))
        if name == "reduce_scatter":
            return communicator.reduce_scatter(tensor, torch.zeros(shape[1:], dtype=dtype))
        return getattr(communicator, name)(tensor, **options)

    return call


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ((of("all_reduce", 4), of("all_gather", 4)), "called all_gather of 16 bytes"),
        ((of("all_reduce", 4), of("all_reduce", 5)), "called all_reduce of 20 bytes"),
        ((of("all_reduce", 0), of("all_reduce", 50_000)), "called all_reduce of 200000 bytes"),
        ((of("all_reduce", 4), of("all_reduce", 4, dtype=torch.int32)), "of another dtype"),
        ((of("all_reduce", 4), of("broadcast", 4, root=0)), "broadcast of 16 bytes from rank 0"),
        ((of("reduce_scatter", 2, 4), of("all_reduce", 4)), "called all_reduce of 16 bytes"),
        ((of("send", 4, peer=1), of("receive", 5, peer=0)), "receives 20 bytes from rank 0"),
    ],
)
def test_ranks_that_call_different_operations_all_hear_of_it(ranks, calls, text):
    ranks.form()

    def run(communicator):
        for _ in range(2):  # the sender sees only at the next operation that it was refused
            calls[communicator.rank](communicator).wait(timeout_s=BOUND_S / 2)
            if text.startswith("receives"):
                communicator.all_reduce(torch.zeros(1)).wait()

    errors = ranks.together(run)
    assert [type(error) for error in errors] == [CommunicatorMisuse] * 2, errors
    assert any(text in str(error) for error in errors), errors


def test_two_roots_of_one_broadcast_are_found_when_the_buffer_comes_round(ranks):
    """A root waits for nobody, so neither sees the other at first."""
    ranks.form()

    def run(communicator):
        for _ in range(20):
            communicator.broadcast(torch.zeros(4), communicator.rank).wait()

    errors = ranks.together(run)
    assert [type(error) for error in errors] == [CommunicatorMisuse] * 2, errors


# ---------------------------------------------------------------- processes


def start_stress(*arguments):
    return subprocess.Popen(
        [sys.executable, str(STRESS), *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def troubled():
    """When a rank of three was killed and one of two stopped; what the others then said."""
    process = start_stress("endless", "2", "3")
    pids = {}
    lines = (json.loads(line) for line in process.stdout)
    try:
        pids = {(line["group"], line["rank"]): line["pid"] for line in itertools.islice(lines, 5)}
        named = {path.name for path in FOLDER.glob("polychip.*")}
        at = time.monotonic()
        os.kill(pids[3, 1], signal.SIGKILL)
        os.kill(pids[2, 1], signal.SIGSTOP)
        records = list(itertools.islice(lines, 3))
        os.kill(pids[2, 1], signal.SIGCONT)
        records += list(lines)
    finally:
        for pid in (*pids.values(), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
    left = [name for name in named if any(f".{pid}." in name for pid in pids.values())]
    return at, {(record["group"], record["rank"]): record for record in records}, left


def test_a_killed_rank_is_noticed_at_once_though_its_parent_does_not_bury_it(troubled):
    killed_at, records, _ = troubled
    for rank in (0, 2):
        record = records[3, rank]
        assert record["error"] == "PeerLost"
        assert "rank 1" in record["text"]
        assert record["at"] - killed_at < 1.0


def test_a_stopped_rank_is_lost_when_it_has_not_beaten_for_two_seconds(troubled):
    stopped_at, records, _ = troubled
    assert records[2, 0]["error"] == "PeerLost"
    assert "rank 1 stands still: no sign of life for 2000 ms" in records[2, 0]["text"]
    assert 1.5 < records[2, 0]["at"] - stopped_at < 4.0
    # When it goes on, it hears that it was given up.
    assert records[2, 1]["error"] == "PeerLost"
    assert "rank 0 left because it lost rank 1" in records[2, 1]["text"]


def test_a_group_at_work_has_nothing_in_the_folder_that_could_be_left(troubled):
    assert troubled[2] == []


@pytest.mark.parametrize(
    "groups",
    [
        ["2:10000:1:whole", "3:10000:2:small", "4:10000:6:whole"],
        pytest.param(["2:1000000:3:whole"], marks=pytest.mark.long),
        pytest.param(["3:1000000:4:small"], marks=pytest.mark.long),
        pytest.param(["4:1000000:5:whole"], marks=pytest.mark.long),
    ],
)
def test_random_operations_are_exact_on_every_rank(groups):
    """All six mixed, one rank delayed at random, many under way at once."""
    process = start_stress("stress", *groups)
    output, errors = process.communicate(timeout=1800.0)
    assert process.returncode == 0, errors
    records = [json.loads(line) for line in output.splitlines()]
    for group in groups:
        size = int(group[0])
        sums = [record["crc"] for record in records if record["group"] == size]
        assert len(sums) == size
        assert len(set(sums)) == 1


# ---------------------------------------------------------------- whether memory is shared


def no_library():
    raise BackendUnavailable("no library here")


@pytest.mark.parametrize("odd_rank", [0, 1])
@pytest.mark.parametrize(
    ("find_library", "changes", "reason"),
    [
        (no_library, {}, "no library here"),
        (Library, {"folder": Path("/nowhere")}, "/nowhere"),
        (Library, {"buffer_bytes": 8192}, "bytes offered"),
    ],
)
def test_all_ranks_refuse_when_one_cannot(odd_rank, find_library, changes, reason):
    ways = [(Library, SMALL)] * 2
    ways[odd_rank] = (find_library, SharedMemorySettings(**{**vars(SMALL), **changes}))
    answers = join(ways)
    assert answers[0] == answers[1]
    assert isinstance(answers[0], Refusal)
    assert reason in answers[0].reason
    assert not list(FOLDER.glob(f"polychip.*.{os.getpid()}.*"))


def test_memory_of_the_same_name_that_is_another_is_refused(monkeypatch, tmp_path):
    """As in another container: the name is there, but the nonce does not arrive."""
    mapped = Segment.map

    def map_another(name, size_bytes, folder):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        return mapped(name, size_bytes, tmp_path)

    monkeypatch.setattr(Segment, "map", map_another)
    answers = join([(Library, SMALL)] * 2)
    assert answers == [Refusal("rank 1 has mapped other memory")] * 2


def join(ways):
    """What each of two ranks comes to, by its (find_library, settings)."""
    places = [GroupPlace(rank, 2, "join/epoch1", BOUND_S, BOUND_S) for rank in range(2)]
    hosted = GlooRendezvous.open(BOUND_S)
    meetings = [hosted, GlooRendezvous.join(hosted.address, BOUND_S)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join_shared_memory, places, meetings, *zip(*ways, strict=True)))


def test_the_option_collectives_decides(caplog):
    for option, kind in (("auto", "SharedMemoryCommunicator"), ("gloo", "GlooCommunicator")):
        config = BackendConfig(chip_indices=(0,), options={"collectives": option})
        runtimes = [CpuRuntime(CpuBackend(), config) for _ in range(2)]
        places = [GroupPlace(rank, 2, "option/epoch1", BOUND_S, BOUND_S) for rank in range(2)]
        address = runtimes[0].open_rendezvous(places[0])
        with ThreadPoolExecutor(2) as pool:
            connect = partial(connect_one, address)
            communicators = list(pool.map(connect, runtimes, places))
        assert [type(each).__name__ for each in communicators] == [kind] * 2
        for communicator in communicators:
            communicator.close()
    assert not caplog.records


def connect_one(address, runtime, place):
    return runtime.create_communicator(None, place, address)


def test_a_missing_library_names_the_remedy(tmp_path):
    with pytest.raises(BackendUnavailable, match="compiler and run scripts/setup"):
        Library(tmp_path / "nothing.so")


def test_no_room_names_the_size_and_the_remedy(monkeypatch):
    def no_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(BackendUnavailable, match=r"4096 bytes .*No space left.* --shm-size"):
        Segment.create("full", 4096)
    assert not list(FOLDER.glob(f"polychip.*.{os.getpid()}.*"))


def test_the_segment_of_a_rank_killed_while_it_waited_is_removed_by_the_next():
    program = (
        "import os; from backends.cpu.shared_memory_segment import Segment\n"
        "print(Segment.create('abandoned', 4096).path, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    abandoned = Path(ended.stdout.strip())
    assert abandoned.exists(), ended.stderr
    kept = Segment.create("kept", 4096)
    assert not abandoned.exists()
    Segment.create("another", 4096).close()
    assert kept.path.exists()
    kept.close()
