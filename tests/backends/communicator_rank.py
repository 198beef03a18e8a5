"""One rank of a communicator test, as a process; prints one JSON record.

    communicator_rank.py BACKEND SCENARIO RANK WORLD_SIZE FOLDER

The meeting point's address travels through a file in the folder, as it would through the control
plane.
"""

import json
import sys
import time
import zlib
from pathlib import Path

import torch

from backends.errors import CommunicatorError
from backends.interface import BackendConfig, GroupPlace, open_runtime
from backends.plugin import find_backend

SHAPES = ((1, 576), (64, 576), (300, 576), (3, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def main():
    backend_name, scenario, rank, world_size, folder = sys.argv[1:]
    place = GroupPlace(
        int(rank), int(world_size), "group0/epoch1", join_deadline_s=30.0, step_deadline_s=30.0
    )
    config = BackendConfig(chip_indices=(place.rank,), chips_on_host=place.world_size)
    backend = find_backend(backend_name)
    backend.on_init(config)
    runtime = open_runtime(backend, config)
    device = runtime.acquire(1).granted[0]
    torch.set_num_threads(1)
    communicator = runtime.create_communicator(device, place, meet(runtime, place, Path(folder)))
    record = SCENARIOS[scenario](communicator, device)
    communicator.close()
    sys.stdout.write(json.dumps(record) + "\n")


def meet(runtime, place, folder):
    path = folder / "address"
    if place.rank == 0:
        address = runtime.open_rendezvous(place)
        path.with_suffix(".part").write_bytes(address)
        path.with_suffix(".part").rename(path)
        return address
    while not path.exists():
        time.sleep(0.01)
    return path.read_bytes()


def inputs(world_size, shape, dtype):
    """Every rank's tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    wide = torch.randn((world_size, *shape), generator=generator) * 1000
    return wide.to(dtype)


def operations(communicator, device):
    """Every operation in every shape and dtype, checked here; the sums also between the ranks."""
    crc = 0
    for shape in SHAPES:
        for dtype in DTYPES:
            everyone = inputs(communicator.world_size, shape, dtype)
            crc = check_sums(communicator, device, everyone, crc)
            check_moves(communicator, device, everyone)
    return {"crc": crc}


def check_sums(communicator, device, everyone, crc):
    rank, world_size = communicator.rank, communicator.world_size
    exact = everyone.double().sum(0)
    tolerance = 1e-2 if everyone.dtype == torch.bfloat16 else 1e-5
    reduced = device.to_chip(everyone[rank])
    communicator.all_reduce(reduced).wait()
    result = device.to_host(reduced)
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance * 1000)
    scattered = device.allocate(everyone.shape[1:], everyone.dtype)
    parts = torch.stack([everyone[rank] + part for part in range(world_size)])
    communicator.reduce_scatter(device.to_chip(parts), scattered).wait()
    expected = sum((everyone[r] + rank).double() for r in range(world_size))
    torch.testing.assert_close(
        device.to_host(scattered).double(), expected, rtol=tolerance, atol=tolerance * 1000
    )
    return zlib.crc32(result.view(torch.uint8).numpy().tobytes(), crc)


def check_moves(communicator, device, everyone):
    rank, world_size = communicator.rank, communicator.world_size
    gathered = device.allocate(everyone.shape, everyone.dtype)
    communicator.all_gather(device.to_chip(everyone[rank]), gathered).wait()
    assert torch.equal(device.to_host(gathered), everyone)
    for root in range(world_size):
        tensor = device.to_chip(everyone[rank])
        communicator.broadcast(tensor, root).wait()
        assert torch.equal(device.to_host(tensor), everyone[root])
    to_right, to_left = (rank + 1) % world_size, (rank - 1) % world_size
    received = [device.allocate(everyone.shape[1:], everyone.dtype) for _ in range(2)]
    mine = device.to_chip(everyone[rank])
    # All send before any receives, and twice, so that the order of messages is told apart.
    works = [communicator.send(mine, to_right), communicator.send(mine + 1, to_right)]
    works += [communicator.receive(tensor, to_left) for tensor in received]
    for work in works:
        work.wait(timeout_s=20.0)
        assert work.done()
        assert work.exception() is None
    for offset, tensor in enumerate(received):
        assert torch.equal(device.to_host(tensor), everyone[to_left] + offset)


def endless(communicator, device):
    """Sums until it fails; the test kills a rank."""
    tensor = device.to_chip(torch.zeros(64, 576))
    step = 0
    while True:
        started = time.monotonic()
        try:
            communicator.all_reduce(tensor).wait()
        except CommunicatorError as error:
            seconds = time.monotonic() - started
            return {"error": type(error).__name__, "seconds": seconds, "retryable": error.retryable}
        step += 1
        if step == 10:
            sys.stdout.write("working\n")
            sys.stdout.flush()


SCENARIOS = {"operations": operations, "endless": endless}

if __name__ == "__main__":
    main()
