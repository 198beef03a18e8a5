"""Records of a backend's primitives: complete, in order, selectable, and changing nothing."""

import inspect
import itertools

import pytest
import torch

from backends.communicator import Communicator, SingleRankCommunicator, Work
from backends.debug import DebugLog, DebugRuntime
from backends.debug_proxies import (
    debug_communicator,
    debug_device,
    debug_memory_pool,
    primitives,
)
from backends.device import Device
from backends.errors import BackendError, OutOfMemory
from backends.interface import BackendRuntime, BatchRows, GroupPlace, KVSpec, Requirement
from backends.memory import MemoryPool

SPEC = KVSpec(layers=2, kv_heads=1, head_size=8, block_tokens=4, dtype=torch.float32)


class Records(list):
    """A sink that keeps what it is given."""

    @property
    def names(self):
        return [record.primitive for record in self]


@pytest.fixture
def records():
    return Records()


@pytest.fixture
def open_debug(runtime, device, records, monkeypatch):
    """A debug runtime over the backend under test, on the chip that is open already."""

    def run(pattern="*", ring_calls=256, **settings):
        monkeypatch.setattr(
            runtime,
            "acquire",
            lambda _count: type("Acquired", (), {"granted": (device,), "rejected": {}})(),
        )
        debug = DebugRuntime(runtime, DebugLog(records.append, pattern, ring_calls, **settings))
        return debug, debug.acquire(1).granted[0]

    return run


def test_what_is_done_on_a_device_is_recorded_with_shapes_and_bytes(open_debug, records):
    _, chip = open_debug()
    source = torch.arange(12.0).view(3, 4)
    assert torch.equal(chip.to_host(chip.to_chip(source)), source)
    chip.allocate((2, 5), torch.int64)
    chip.fence().wait(timeout_s=5.0)
    assert records.names == [
        "device.to_chip",
        "device.to_host",
        "device.allocate",
        "device.fence",
        "device.wait",
    ]
    to_chip, _, allocate, _, wait = records
    assert to_chip.shapes == ((3, 4),)
    assert to_chip.dtypes == ("float32",)
    assert to_chip.bytes_count == 48
    assert to_chip.duration_ns > 0
    assert allocate.shapes == ((2, 5),), "of its result, for it is given no tensor"
    assert allocate.bytes_count == 80
    assert wait.numbers == (5.0,)
    assert [record.sequence for record in records] == [1, 2, 3, 4, 5]


def test_tensors_in_lists_are_recorded_too(open_debug, records):
    _, chip = open_debug("device.copy_each")
    sources = [torch.ones(2, 3), torch.ones(4)]
    chip.copy_each(sources, [chip.allocate(each.shape, each.dtype) for each in sources])
    assert records[0].shapes == ((2, 3), (4,), (2, 3), (4,))
    assert records[0].bytes_count == 80


def test_a_kernel_is_recorded_with_its_implementation_and_reason(open_debug, records):
    debug, chip = open_debug("kernels.*")
    kernels = debug.bind_kernels({"linear": Requirement("float32", rows=2, last_dimension=32)})
    x = chip.to_chip(torch.ones(2, 32))
    product = kernels.dispatch("linear", x, chip.to_matrix(torch.ones(3, 32)), None, None)
    assert chip.to_host(product).tolist() == [[32.0] * 3] * 2
    (record,) = records
    choice = kernels.choices["linear"]
    assert record.primitive == "kernels.linear"
    assert (record.implementation, record.reason) == (choice.implementation, choice.reason)
    assert record.shapes == ((2, 32), (3, 32))
    assert record.bytes_count >= 256 + 384, "a chip may pad a matrix"


def test_a_memory_pool_is_recorded_and_stays_the_pool_it_is(open_debug, records):
    debug, chip = open_debug("memory.*")
    pool = debug.create_memory_pool(chip, SPEC, 6)
    assert isinstance(pool, MemoryPool)
    assert (pool.capacity, pool.spec, pool.layout) == (6, SPEC, debug.kv_layout(SPEC))
    pool.retain([2, 3])
    assert (pool.references(2), pool.references(4)) == (1, 0)
    pool.quota = 5
    assert pool.quota == 5
    pool.bind(BatchRows((0, 2), (0,), ([2],)))
    pool.zero_blocks([2])
    pool.copy_block(2, 3)
    pool.release([2, 3])
    pool.close()
    assert records.names == [
        "memory.create_memory_pool",
        "memory.bind",
        "memory.zero_blocks",
        "memory.copy_block",
        "memory.close",
    ]
    assert records[3].numbers == (2, 3)


def test_a_communicator_and_the_waits_for_it_are_recorded(open_debug, records):
    debug, chip = open_debug("collectives.*")
    place = GroupPlace(0, 1, "alone", join_deadline_s=5.0, step_deadline_s=5.0)
    communicator = debug.create_communicator(chip, place, b"")
    assert (communicator.rank, communicator.world_size) == (0, 1)
    work = communicator.all_reduce(chip.to_chip(torch.ones(4)))
    work.wait_stream()
    work.wait(2.5)
    assert work.done()
    assert work.exception() is None
    with communicator.group():
        communicator.broadcast(chip.to_chip(torch.ones(4)), root=0)
    communicator.close()
    assert records.names == [
        "collectives.create_communicator",
        "collectives.all_reduce",
        "collectives.wait_stream",
        "collectives.wait",
        "collectives.broadcast",
        "collectives.close",
    ]
    assert records[4].numbers == (0,), "arguments by name count too"


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("*", ["device.to_chip", "device.copy", "device.synchronize", "device.to_host"]),
        ("device.copy", ["device.copy"]),
        ("kernels.*, device.to_*", ["device.to_chip", "device.to_host"]),
        ("collectives.*", []),
    ],
)
def test_a_pattern_selects_what_is_told_and_the_ring_keeps_all(open_debug, records, pattern, told):
    debug, chip = open_debug(pattern)
    tensor = chip.to_chip(torch.ones(3))
    chip.copy(tensor, tensor)
    chip.synchronize()
    chip.to_host(tensor)
    assert records.names == told
    assert len(debug.log.dump()) == 4


def test_a_pattern_that_selects_nothing_is_refused_with_the_names_there_are(open_debug):
    with pytest.raises(BackendError, match=r"'kernel\.\*' selects no primitive.*kernels\.linear"):
        open_debug("device.copy,kernel.*")


def test_the_ring_holds_the_last_calls_oldest_first(open_debug):
    debug, chip = open_debug("collectives.*", ring_calls=3)
    for size in range(1, 6):
        chip.allocate((size,), torch.int64)
    assert [call.shapes for call in debug.log.dump()] == [((3,),), ((4,),), ((5,),)]


def test_a_call_that_fails_is_recorded_with_its_error_and_raises_it(open_debug, records):
    debug, chip = open_debug("device.*")
    with pytest.raises(OutOfMemory) as raised:
        chip.allocate((1 << 50,), torch.int64)
    last = records[-1]
    assert last.primitive == "device.allocate"
    assert last.error == f"OutOfMemory: {raised.value}"
    assert last.duration_ns is not None
    assert debug.log.dump()[-1] is last


def test_a_call_that_has_not_returned_is_in_the_ring():
    log = DebugLog(lambda _call: None)
    seen = []
    log.call("device", "copy", lambda: seen.extend(str(call) for call in log.dump()), ())
    assert seen == ["1 device.copy | has not returned"]


def test_a_record_reads_as_one_line(records):
    ticks = itertools.count(step=1500)
    log = DebugLog(records.append, clock_ns=lambda: next(ticks))
    log.stream_of_chip = lambda: "main"
    log.call(
        "kernels", "rms_norm", lambda *_: None, (torch.ones(2, 3), torch.ones(3), 1e-5), "fast", "x"
    )
    assert str(records[0]) == (
        "1 kernels.rms_norm | float32[2, 3] float32[3] | 1e-05 | fast | 1.5 us"
    )
    assert records[0].stream == "main"


@pytest.mark.parametrize(
    ("contract", "stand_in"),
    [
        (Device, debug_device),
        (MemoryPool, debug_memory_pool),
        (Communicator, debug_communicator),
        (BackendRuntime, DebugRuntime),
    ],
)
def test_nothing_a_contract_offers_falls_to_its_default(contract, stand_in):
    offered = {name for name in vars(contract) if not name.startswith("_")}
    missing = offered - set(vars(stand_in))
    assert not missing, f"{stand_in.__name__} must pass on {missing} too"
    assert not inspect.isabstract(stand_in)


def test_a_stand_in_takes_the_place_of_what_it_stands_for():
    communicator = debug_communicator(SingleRankCommunicator(), DebugLog(lambda _call: None))
    assert isinstance(communicator, Communicator)
    assert isinstance(communicator.all_reduce(torch.ones(1)), Work)


def test_primitives_are_named_by_layer():
    names = primitives()
    assert {
        "device.copy",
        "memory.bind",
        "kernels.attention",
        "collectives.all_reduce",
        "collectives.wait",
    } <= names
    assert not {"collectives.done", "device.memory_info", "memory.retain"} & names
