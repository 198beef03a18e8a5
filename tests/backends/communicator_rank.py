"""One rank of a communicator test, as a process; prints one JSON record.

    communicator_rank.py BACKEND OPTIONS SCENARIO RANK WORLD_SIZE FOLDER

The meeting point's address travels through a file in the folder, as it would through the control
plane.
"""

import json
import statistics
import sys
import time
import zlib
from pathlib import Path

import torch

from backends.errors import CommunicatorError, UnsupportedOperation
from backends.fusion import compose
from backends.interface import BackendConfig, GroupPlace, open_runtime
from backends.plugin import find_backend

SHAPES = ((1, 576), (64, 576), (300, 576), (3, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def main():
    backend_name, options, scenario, rank, world_size, folder = sys.argv[1:]
    step_deadline_s = 1.0 if scenario == "impatient" else 30.0
    place = GroupPlace(
        int(rank),
        int(world_size),
        "group0/epoch1",
        join_deadline_s=30.0,
        step_deadline_s=step_deadline_s,
    )
    config = BackendConfig(
        chip_indices=(place.rank,), chips_on_host=place.world_size, options=json.loads(options)
    )
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
    check_messages(communicator, device, everyone)


def check_messages(communicator, device, everyone):
    """Two messages round the ring; even ranks send first: a send may last until it is received."""
    rank, world_size = communicator.rank, communicator.world_size
    to_right, to_left = (rank + 1) % world_size, (rank - 1) % world_size
    received = [device.allocate(everyone.shape[1:], everyone.dtype) for _ in range(2)]

    def send():
        for offset in range(2):
            mine = device.to_chip(everyone[rank] + offset)
            communicator.send(mine, to_right).wait(timeout_s=20.0)

    def receive():
        for tensor in received:
            work = communicator.receive(tensor, to_left)
            work.wait(timeout_s=20.0)
            assert work.done()
            assert work.exception() is None

    for step in (send, receive) if rank % 2 == 0 else (receive, send):
        step()
    for offset, tensor in enumerate(received):
        assert torch.equal(device.to_host(tensor), everyone[to_left] + offset)


def endless(communicator, device):
    """Sums until it fails; the test kills or stops a rank."""
    tensor = device.to_chip(torch.zeros(64, 576))
    return until_it_fails(lambda: communicator.all_reduce(tensor).wait())


def replaying(communicator, device):
    """The same with a captured program of many sums, where programs hold any."""
    tensor = device.to_chip(torch.zeros(64, 576))

    def sums():
        for _ in range(30):
            device.in_order(
                lambda part: communicator.all_reduce(part).wait_stream(),
                tensor,
                native=communicator.native_all_reduce,
            )

    try:
        program = device.capture(sums)
    except UnsupportedOperation:
        if communicator.native_all_reduce(tensor) is not None:
            raise
        say("not applicable")
        return {}

    def replay():
        program.replay()
        device.synchronize()

    return until_it_fails(replay)


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def until_it_fails(function):
    step = 0
    while True:
        started = time.monotonic()
        try:
            function()
        except CommunicatorError as error:
            seconds = time.monotonic() - started
            return {"error": type(error).__name__, "seconds": seconds, "retryable": error.retryable}
        step += 1
        if step == 10:
            say("working")


def fusing(communicator, device):
    """Seconds of eight messages of 2 KB, each waited for, and of the same in one group."""
    composed = compose(communicator, device, checked=False)
    tensors = [device.to_chip(torch.zeros(512)) for _ in range(8)]

    def apart():
        for tensor in tensors:
            communicator.all_reduce(tensor).wait_stream()

    def together():
        with composed.group():
            works = [composed.all_reduce(tensor) for tensor in tensors]
        for work in works:
            work.wait_stream()

    seconds = {apart: [], together: []}
    for run in range(6):
        for measured, kept in seconds.items():
            started = time.perf_counter()
            for _ in range(300):
                measured()
            # The first run pays for what is set up on demand.
            if run > 0:
                kept.append((time.perf_counter() - started) / 300)
    return {function.__name__: statistics.median(kept) for function, kept in seconds.items()}


SCENARIOS = {
    "operations": operations,
    "endless": endless,
    "replaying": replaying,
    "impatient": endless,
    "fusing": fusing,
}
"""impatient: with a short deadline for each operation."""

if __name__ == "__main__":
    main()
