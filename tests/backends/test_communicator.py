"""Collectives between real processes: results, bit-identity, and a lost or silent rank."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from backends.errors import CommunicatorError, CommunicatorTimeout, PeerLost
from backends.interface import GroupPlace, open_runtime

RANK_PROGRAM = Path(__file__).with_name("communicator_rank.py")
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 90.0


@pytest.fixture
def start(backend_name, tmp_path):
    """Starts the ranks of a scenario; whatever still runs at the end is killed."""
    processes = []

    def run(scenario, world_size):
        for rank in range(world_size):
            arguments = [backend_name, scenario, str(rank), str(world_size), str(tmp_path)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(RANK_PROGRAM), *arguments],
                    cwd=ROOT,
                    env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return processes

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def record_of(process):
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_operations_and_sums_alike_to_the_bit(start, world_size):
    records = [record_of(process) for process in start("operations", world_size)]
    assert len({record["crc"] for record in records}) == 1


def test_a_killed_rank_is_noticed_by_all_others_at_once(start):
    processes = start("endless", 3)
    for process in processes:
        assert process.stdout.readline() == "working\n"
    processes[1].kill()
    for survivor in (processes[0], processes[2]):
        record = record_of(survivor)
        assert record["error"] == "PeerLost"
        assert record["retryable"]
        assert record["seconds"] < 3.0


def test_a_rank_that_never_comes_costs_the_deadline(runtime, device):
    place = GroupPlace(rank=0, world_size=2, key="alone", join_deadline_s=0.5, step_deadline_s=0.5)
    with pytest.raises(CommunicatorTimeout, match=r"rank 0 of 2 joins 'alone'"):
        runtime.create_communicator(device, place, runtime.open_rendezvous(place))


@pytest.fixture
def two_ranks(backend, device, config):
    """Two ranks as threads of this process, a deadline of half a second each."""
    place = GroupPlace(
        rank=0, world_size=2, key="threads", join_deadline_s=0.5, step_deadline_s=0.5
    )
    runtimes = [open_runtime(backend, config) for _ in range(2)]
    address = runtimes[0].open_rendezvous(place)
    joined = []

    def join():
        second = GroupPlace(
            rank=1, world_size=2, key="threads", join_deadline_s=0.5, step_deadline_s=0.5
        )
        joined.append(runtimes[1].create_communicator(device, second, address))

    thread = threading.Thread(target=join)
    thread.start()
    first = runtimes[0].create_communicator(device, place, address)
    thread.join(timeout=10.0)
    yield first, joined[0]
    first.close()
    joined[0].close()


def test_an_operation_ends_at_the_groups_deadline_without_being_asked(two_ranks):
    work = two_ranks[0].all_reduce(torch.zeros(4))
    with pytest.raises(CommunicatorTimeout):
        work.wait()
    assert isinstance(work.exception(), CommunicatorTimeout)
    assert work.done()


def test_a_shorter_wait_costs_the_communicator_too(two_ranks):
    with pytest.raises(CommunicatorTimeout):
        two_ranks[0].receive(torch.zeros(4), 1).wait(timeout_s=0.1)
    with pytest.raises(CommunicatorError, match="closed or broken"):
        two_ranks[0].all_reduce(torch.zeros(4))
    with pytest.raises(PeerLost):
        two_ranks[1].all_reduce(torch.zeros(4)).wait()


def test_done_turns_true_without_a_wait(two_ranks):
    tensors = [torch.ones(4), torch.ones(4)]
    early = two_ranks[0].all_reduce(tensors[0])
    assert not early.done()
    assert early.exception() is None
    two_ranks[1].all_reduce(tensors[1]).wait()
    give_up = time.monotonic() + 10.0
    while not early.done():
        assert time.monotonic() < give_up
        time.sleep(0.001)
    assert early.exception() is None
    assert tensors[0].tolist() == [2.0] * 4


def test_after_close_and_abort_nothing_is_accepted(two_ranks):
    two_ranks[0].close()
    two_ranks[1].abort()
    for communicator in two_ranks:
        with pytest.raises(CommunicatorError, match="closed or broken"):
            communicator.all_reduce(torch.zeros(4))


def test_a_rank_that_does_not_exist_is_named(two_ranks):
    with pytest.raises(CommunicatorError, match="rank 0 of 2 cannot exchange with rank 2"):
        two_ranks[0].send(torch.zeros(4), 2)
    with pytest.raises(CommunicatorError, match="rank 0 of 2 cannot exchange with rank 0"):
        two_ranks[0].receive(torch.zeros(4), 0)


def test_a_group_of_one_needs_no_meeting_point(runtime, device):
    place = GroupPlace(rank=0, world_size=1, key="single", join_deadline_s=1.0, step_deadline_s=1.0)
    communicator = runtime.create_communicator(device, place, b"")
    tensor, gathered = torch.arange(3.0), torch.zeros(1, 3)
    communicator.all_reduce(tensor).wait()
    communicator.all_gather(tensor, gathered).wait()
    communicator.broadcast(tensor, 0).wait()
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert gathered.tolist() == [[0.0, 1.0, 2.0]]
    with pytest.raises(CommunicatorError, match="group of one"):
        communicator.send(tensor, 1)
