"""One rank of `polychip bench collectives`, as a process; rank 0 prints what it measured as JSON.

    python -m scripts.collective_bench RANK WORLD_SIZE RUNS FOLDER

Both ways are open at once and measured in turn, run by run, so that whatever else the machine does
meanwhile slows both. The ranks meet through files in the folder.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from backends.errors import BackendError
from backends.fusion import compose
from backends.interface import BackendConfig, Communicator, Device, GroupPlace, open_runtime
from backends.plugin import find_backend

DEADLINE_S = 60.0
WAYS = {"native": "shared-memory", "gloo": "gloo"}
SHAPES = ((1, 64), (1, 576), (8, 576), (64, 576), (300, 576), (2048, 576))
"""[tokens, hidden size] of a small model: a step of one row, of some, a chunk of a prompt."""

MEASURED_BYTES = 2 << 20
"""A run repeats a message until so much was exchanged, within the two limits below."""
REPEATS_MIN, REPEATS_MAX = 5, 200

SMALL_MESSAGES = 8
SMALL_ELEMENTS = 512
"""2 KB of float32."""


@dataclass(frozen=True)
class Row:
    """A message and the median time it took each way; in microseconds."""

    operation: str
    shape: tuple[int, ...]
    bytes: int
    native_us: float
    gloo_us: float
    ratio: float


@dataclass(frozen=True)
class SmallMessages:
    """Small sums one way, in microseconds for all of them.

    apart: each waited for before the next. together: all submitted, then waited for. packed: in a
    group of the communicator a worker computes with, which makes one message of them.
    """

    way: str
    messages: int
    bytes_each: int
    apart_us: float
    together_us: float
    packed_us: float


def main() -> int:
    """Measures; 1 if a rank could not take part."""
    rank, world_size, runs = (int(text) for text in sys.argv[1:4])
    try:
        device, ways = _open_ways(rank, world_size, Path(sys.argv[4]))
        rows = [_measure_row(name, shape, device, ways, runs) for name, shape in _messages()]
        small = [_measure_small(way, device, ways[way], runs) for way in ways]
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    if rank == 0:
        result = {"rows": rows, "small_messages": small}
        print(json.dumps(result, default=asdict))
    return 0


def _open_ways(rank: int, world_size: int, folder: Path) -> tuple[Device, dict[str, Communicator]]:
    device: Device | None = None
    ways: dict[str, Communicator] = {}
    for way, option in WAYS.items():
        config = BackendConfig(
            chip_indices=(rank,), chips_on_host=world_size, options={"collectives": option}
        )
        backend = find_backend("cpu")
        backend.on_init(config)
        runtime = open_runtime(backend, config)
        if device is None:
            device = runtime.acquire(1).granted[0]
        place = GroupPlace(rank, world_size, f"bench/{way}", DEADLINE_S, DEADLINE_S)
        address = _address(folder / way, runtime.open_rendezvous(place) if rank == 0 else None)
        ways[way] = runtime.create_communicator(device, place, address)
    assert device is not None
    return device, ways


def _address(path: Path, own: bytes | None) -> bytes:
    """Rank 0's address, which it leaves in a file for the others."""
    if own is not None:
        part = path.with_suffix(".part")
        part.write_bytes(own)
        part.rename(path)
        return own
    give_up = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > give_up:
            raise BackendError(f"rank 0 did not come within {DEADLINE_S:.0f} s")
        time.sleep(0.01)
    return path.read_bytes()


def _messages() -> list[tuple[str, tuple[int, int]]]:
    sums = [("all_reduce", shape) for shape in SHAPES]
    return [*sums, ("all_gather", (1, 576)), ("broadcast", (1, 576))]


def _measure_row(
    name: str,
    shape: tuple[int, int],
    device: Device,
    ways: dict[str, Communicator],
    runs: int,
) -> Row:
    tensor = device.to_chip(torch.zeros(shape))
    calls = {way: _call(name, tensor, device, communicator) for way, communicator in ways.items()}
    repeats = min(REPEATS_MAX, max(REPEATS_MIN, MEASURED_BYTES // tensor.nbytes))
    times_us = _interleaved(calls, repeats, runs)
    native_us, gloo_us = times_us["native"], times_us["gloo"]
    return Row(name, shape, tensor.nbytes, native_us, gloo_us, gloo_us / native_us)


def _call(
    name: str, tensor: torch.Tensor, device: Device, communicator: Communicator
) -> Callable[[], None]:
    if name == "all_gather":
        output = device.allocate((communicator.world_size, *tensor.shape), tensor.dtype)
        return lambda: communicator.all_gather(tensor, output).wait()
    if name == "broadcast":
        # And a sum of one number: the root of a broadcast waits for nobody.
        one = device.to_chip(torch.zeros(1))

        def broadcast() -> None:
            communicator.broadcast(tensor, 0).wait()
            communicator.all_reduce(one).wait()

        return broadcast
    return lambda: communicator.all_reduce(tensor).wait()


def _measure_small(
    way: str, device: Device, communicator: Communicator, runs: int
) -> SmallMessages:
    tensors = [device.to_chip(torch.zeros(SMALL_ELEMENTS)) for _ in range(SMALL_MESSAGES)]
    composed = compose(communicator, device, checked=False)

    def apart() -> None:
        for tensor in tensors:
            communicator.all_reduce(tensor).wait()

    def together() -> None:
        for work in [communicator.all_reduce(tensor) for tensor in tensors]:
            work.wait()

    def packed() -> None:
        with composed.group():
            works = [composed.all_reduce(tensor) for tensor in tensors]
        for work in works:
            work.wait()

    calls = {"apart": apart, "together": together, "packed": packed}
    times_us = _interleaved(calls, REPEATS_MAX, runs)
    return SmallMessages(way, SMALL_MESSAGES, tensors[0].nbytes, *times_us.values())


def _interleaved(calls: dict[str, Callable[[], None]], repeats: int, runs: int) -> dict[str, float]:
    """The median over the runs of the time of a call in microseconds."""
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _time_us(call, REPEATS_MIN)
    for _ in range(runs):
        for name, call in calls.items():
            times_us[name].append(_time_us(call, repeats))
    return {name: median(each) for name, each in times_us.items()}


def _time_us(call: Callable[[], None], repeats: int) -> float:
    """The median call of a run: one that another program interrupts does not count."""
    times_ns = []
    for _ in range(repeats):
        started_ns = time.perf_counter_ns()
        call()
        times_ns.append(time.perf_counter_ns() - started_ns)
    return median(times_ns) / 1e3


if __name__ == "__main__":
    sys.exit(main())
