"""Random collectives between processes that share memory, each result compared bit by bit.

    collective_stress.py stress WORLD_SIZE:OPERATIONS:SEED:SIZES ...   one group after the other
    collective_stress.py endless WORLD_SIZE ...                        until a rank is lost

SIZES: "whole" for the buffers and rings of a service, "small" for such that most messages are
larger than them. The ranks are forked from one process, which imports torch only once, and print
one JSON record each.
"""

import json
import os
import random
import sys
import tempfile
import time
import zlib
from collections import deque
from pathlib import Path

import torch

from backends.communicator import Communicator, Work
from backends.cpu.shared_memory_end import SharedMemorySettings
from backends.cpu.shared_memory_join import Refusal, join_shared_memory
from backends.cpu.shared_memory_library import Library
from backends.errors import CommunicatorError
from backends.gloo_rendezvous import GlooRendezvous
from backends.interface import GroupPlace

DEADLINE_S = 60.0
ENDLESS_STEP_DEADLINE_S = 6.0
"""Well beyond the 4 s in which a rank must notice that another stands still."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "message", "message", "group")
GROUP_MAX = 5
"""Sums of a group, which counts as one operation."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)
SIZES = {
    "whole": SharedMemorySettings(),
    "small": SharedMemorySettings(buffer_bytes=4096, rings_bytes=0),
}
LENGTHS = (0, 1, 3, 64, 300, 576, 1000, 4099)
LONG_LENGTHS = {"whole": (40_000, 150_000), "small": (9000, 20_000)}
LONG_SHARE = 0.01
PENDING_MAX = 12
DELAY_SHARE = 0.002
DELAY_S = 0.0005


class Pool:
    """Random numbers of every rank in one dtype, and their sums in the order of the ranks."""

    def __init__(self, world_size: int, dtype: torch.dtype, length: int) -> None:
        generator = torch.Generator().manual_seed(7)
        wide = torch.randn((world_size, length), generator=generator) * 100
        self.ranks = wide.abs().to(dtype) if dtype == torch.uint8 else wide.to(dtype)
        exact = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        total = self.ranks[0].to(exact)
        for other in self.ranks[1:]:
            total = total + other.to(exact)
        self.sum = total.to(dtype)
        self.length = length


class Program:
    """The same random operations on every rank; `run` does this rank's part of them."""

    def __init__(
        self, rank: int, world_size: int, seed: int, sizes: str, pools: list[Pool]
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._random = random.Random(seed)
        self._own_random = random.Random(seed * 64 + rank)
        self._long_lengths = LONG_LENGTHS[sizes]
        self._pools = pools
        # Number, work, result, what it must be; the number only where every rank has the result.
        self._pending: deque[tuple[int | None, Work, torch.Tensor, torch.Tensor]] = deque()
        self.crc = 0

    def run(self, communicator: Communicator, operations: int) -> None:
        slow_rank = self._random.randrange(self._world_size)
        for number in range(operations):
            if self._rank == slow_rank and self._own_random.random() < DELAY_SHARE:
                time.sleep(self._own_random.random() * DELAY_S)
            self._submit(communicator, number)
            while len(self._pending) > self._own_random.randrange(PENDING_MAX):
                self._check_one()
        while self._pending:
            self._check_one()

    def _submit(self, communicator: Communicator, number: int) -> None:
        draw, world_size, rank = self._random, self._world_size, self._rank
        kind, pool = draw.choice(KINDS), draw.choice(self._pools)
        length = draw.choice(self._long_lengths if draw.random() < LONG_SHARE else LENGTHS)
        start = draw.randrange(pool.length - world_size * length)
        root, step = draw.randrange(world_size), draw.randrange(1, world_size)
        part = slice(start, start + length)
        if kind == "group":
            # Of one dtype after another, many small ones among them.
            pools = [draw.choice(self._pools) for _ in range(draw.randint(1, GROUP_MAX))]
            sizes = [draw.choice(LENGTHS) for _ in pools]
            tensors = [p.ranks[rank, :size].clone() for p, size in zip(pools, sizes, strict=True)]
            with communicator.group():
                works = [communicator.all_reduce(tensor) for tensor in tensors]
            results = zip(works, tensors, pools, sizes, strict=True)
            self._pending += [(number, work, t, p.sum[:size]) for work, t, p, size in results]
        elif kind == "all_reduce":
            tensor = pool.ranks[rank, part].clone()
            work = communicator.all_reduce(tensor)
            self._pending.append((number, work, tensor, pool.sum[part]))
        elif kind == "all_gather":
            output = torch.empty((world_size, length), dtype=pool.sum.dtype)
            work = communicator.all_gather(pool.ranks[rank, part], output)
            self._pending.append((number, work, output, pool.ranks[:, part]))
        elif kind == "reduce_scatter":
            whole = pool.ranks[rank, start : start + world_size * length]
            output = torch.empty(length, dtype=pool.sum.dtype)
            work = communicator.reduce_scatter(whole.view(world_size, length), output)
            mine = start + rank * length
            self._pending.append((None, work, output, pool.sum[mine : mine + length]))
        elif kind == "broadcast":
            tensor = pool.ranks[rank, part].clone()
            work = communicator.broadcast(tensor, root)
            self._pending.append((number, work, tensor, pool.ranks[root, part]))
        elif rank == root:
            tensor = pool.ranks[rank, part]
            work = communicator.send(tensor, (root + step) % world_size)
            self._pending.append((None, work, tensor, tensor))
        elif rank == (root + step) % world_size:
            tensor = torch.empty(length, dtype=pool.sum.dtype)
            work = communicator.receive(tensor, root)
            self._pending.append((None, work, tensor, pool.ranks[root, part]))

    def _check_one(self) -> None:
        """Any of those pending: they need not be waited for in order."""
        place = self._own_random.randrange(len(self._pending))
        number, work, result, expected = self._pending[place]
        del self._pending[place]
        work.wait()
        assert torch.equal(result, expected), f"rank {self._rank}: {result} is not {expected}"
        if number is not None:
            # Added up, because the ranks check in different orders.
            self.crc += zlib.crc32(result.reshape(-1).view(torch.uint8).numpy(), number)


def meet(
    rank: int, world_size: int, sizes: str, folder: Path, step_deadline_s: float = DEADLINE_S
) -> Communicator:
    """The communicator of a rank; the address travels through a file."""
    place = GroupPlace(rank, world_size, "stress/epoch1", DEADLINE_S, step_deadline_s)
    path = folder / "address"
    if rank == 0:
        rendezvous = GlooRendezvous.open(DEADLINE_S)
        path.with_suffix(".part").write_bytes(rendezvous.address)
        path.with_suffix(".part").rename(path)
    else:
        while not path.exists():
            time.sleep(0.001)
        rendezvous = GlooRendezvous.join(path.read_bytes(), DEADLINE_S)
    joined = join_shared_memory(place, rendezvous, Library, SIZES[sizes])
    assert not isinstance(joined, Refusal), joined.reason
    return joined


def stress(rank, group, folder, pools):
    world_size, operations, seed, sizes = group
    communicator = meet(rank, world_size, sizes, folder)
    program = Program(rank, world_size, seed, sizes, pools)
    started = time.monotonic()
    program.run(communicator, operations)
    seconds = time.monotonic() - started
    communicator.close()
    tell(group=world_size, rank=rank, crc=program.crc, seconds=seconds)


def endless(rank, world_size, folder):
    """Sums until it fails."""
    communicator = meet(rank, world_size, "whole", folder, ENDLESS_STEP_DEADLINE_S)
    tensor = torch.zeros(64, 576)
    step = 0
    while True:
        try:
            communicator.all_reduce(tensor).wait()
        except CommunicatorError as error:
            told = {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
            tell(group=world_size, rank=rank, **told)
            return
        step += 1
        if step == 10:
            tell(group=world_size, rank=rank, pid=os.getpid())


def tell(**record):
    # One write, so that the ranks' lines do not mix.
    os.write(1, (json.dumps(record) + "\n").encode())


def fork(world_size, run):
    """Runs `run(rank, folder)` in a process of its own for each rank; returns the processes."""
    folder = Path(tempfile.mkdtemp(prefix="ranks", dir=os.environ["TMPDIR"]))
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                run(rank, folder)
            except BaseException:  # noqa: BLE001 - told; a rank must not go on as its parent
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def failed_count(children):
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def stress_group(text):
    """Runs one group to its end."""
    *numbers, sizes = text.split(":")
    world_size, operations, seed = map(int, numbers)
    length = world_size * max(LONG_LENGTHS[sizes]) + 1
    pools = [Pool(world_size, dtype, length) for dtype in DTYPES]
    group = (world_size, operations, seed, sizes)
    return fork(world_size, lambda rank, folder: stress(rank, group, folder, pools))


def endless_group(text):
    world_size = int(text)
    return fork(world_size, lambda rank, folder: endless(rank, world_size, folder))


def main():
    scenario, *groups = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        if scenario == "stress":
            return sum(failed_count(stress_group(text)) for text in groups)
        # All at the same time.
        return failed_count([child for text in groups for child in endless_group(text)])


if __name__ == "__main__":
    sys.exit(main())
