"""A random program of collectives, the same on every rank, and what a rank brings to it."""

import random

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def own(rank, shape, dtype=torch.float32, seed=0):
    """What a rank brings: the same on every rank that asks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


class CollectiveProgram:
    """Forty operations drawn from a seed; its results as bytes."""

    def __init__(self, seed, world_size):
        choose = random.Random(seed)
        self.steps = []
        for index in range(40):
            name = choose.choice(
                ["all_reduce"] * 3 + ["all_gather", "reduce_scatter", "broadcast", "message"]
            )
            shape = (choose.choice([0, 1, 3, 17]), choose.choice([1, 64, 200]))
            ends = choose.sample(range(world_size), 2)
            wait = choose.random() < 0.1
            self.steps.append((name, shape, choose.choice(DTYPES), ends, wait, index))

    def run(self, communicator, device):
        """Runs all, in groups if it is told to by the communicator; every result on the host."""
        results, works = [], []
        with communicator.group():
            for step in self.steps:
                work, result = self.submit(communicator, device, *step)
                if work is not None:
                    works.append(work)
                    results.append(result)
                    # A wait inside a group is every rank's or nobody's.
                    if step[4] and step[0] != "message":
                        work.wait_stream()
        for work in works:
            work.wait(10.0)
        return [device.to_host(result).view(torch.uint8) for result in results]

    def submit(self, communicator, device, name, shape, dtype, ends, _wait, seed):
        rank, world_size = communicator.rank, communicator.world_size
        tensor = device.to_chip(own(rank, shape, dtype, seed))
        if name == "all_reduce":
            return communicator.all_reduce(tensor), tensor
        if name == "broadcast":
            return communicator.broadcast(tensor, ends[0]), tensor
        if name == "all_gather":
            output = device.allocate((world_size, *shape), dtype)
            return communicator.all_gather(tensor, output), output
        if name == "reduce_scatter":
            parts = device.to_chip(own(rank, (world_size, *shape), dtype, seed))
            output = device.allocate(shape, dtype)
            return communicator.reduce_scatter(parts, output), output
        if rank == ends[0]:
            return communicator.send(tensor, ends[1]), tensor
        if rank == ends[1]:
            return communicator.receive(tensor, ends[0]), tensor
        return None, None
