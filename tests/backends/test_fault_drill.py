"""Faults on purpose: each becomes a typed error in bounded time, and a new start goes well.

Every backend: a peer that is killed, that falls silent, that leaves. Backends whose faults can be
scripted: chips that fail, hang, slow down, compute wrongly or die.
"""

import signal
import threading
import time
from functools import partial

import pytest
import torch

from backends.errors import (
    CommunicatorError,
    DeviceError,
    DeviceHung,
    OutOfMemory,
)
from backends.interface import BackendConfig, Requirement, open_runtime
from backends.plugin import find_backend
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from tests.backends.kernel_calls import KernelCalls
from tests.backends.local_ranks import LocalRanks

BOUND_S = 15.0
"""No fault may cost the host more than this, on a busy machine."""
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}

KERNELS = {"linear": Requirement("float32", rows=7, last_dimension=4)}

SCRIPTED = {"sim": lambda script: {"faults": script, "pace": "off"}}
"""Backends with scripted faults: the options of a script, under which a chip that dies takes no
process along."""


# ---------------------------------------------------------------- peers, as processes


@pytest.mark.covers("peer killed")
@pytest.mark.parametrize("scenario", ["endless", "replaying"])
def test_a_killed_peer_is_noticed_by_all_others_at_once(start_ranks, scenario):
    ranks = start_ranks(scenario, 3)
    if not ranks.wait_until_working():
        pytest.skip("not applicable: its programs hold no sums")
    ranks.processes[1].kill()
    for survivor in (0, 2):
        record = ranks.record(survivor)
        assert record["error"] == "PeerLost"
        assert record["retryable"]
        assert record["seconds"] < 3.0


@pytest.mark.covers("peer silent")
def test_a_silent_peer_costs_the_deadline(start_ranks):
    """It is there and does nothing: it might answer yet, so only the deadline decides."""
    ranks = start_ranks("impatient", 2)
    assert ranks.wait_until_working()
    ranks.processes[1].send_signal(signal.SIGSTOP)
    record = ranks.record(0)
    assert record["error"] in ("CommunicatorTimeout", "PeerLost")
    assert record["retryable"]
    assert record["seconds"] < BOUND_S


# ---------------------------------------------------------------- peers, as threads


@pytest.fixture
def pair(backend_name, backend_options, device):  # noqa: ARG001 - as it was, at the end
    ranks = LocalRanks(backend_name, 2, backend_options)
    yield ranks
    ranks.close()


@pytest.mark.covers("peer leaves")
def test_after_a_peer_has_left_the_next_epoch_is_as_good_as_new(pair):
    for _ in range(3):
        pair.form(step_deadline_s=1.0)
        assert pair.together(lambda rank: summed(pair, rank)) == [3.0, 3.0]
        pair.on(1, pair.communicators[1].close)
        started = time.monotonic()
        with pytest.raises(CommunicatorError):
            pair.on(0, partial(summed, pair, 0))
        assert time.monotonic() - started < BOUND_S


def summed(ranks, rank):
    tensor = ranks.devices[rank].to_chip(torch.full((33,), rank + 1.0))
    ranks.communicators[rank].all_reduce(tensor).wait()
    return float(ranks.devices[rank].to_host(tensor)[32])


@pytest.mark.covers("abort")
def test_an_abort_from_another_thread_ends_what_waits(pair, backend):
    """At once where the backend says that it can, else at the deadline."""
    pair.form(step_deadline_s=BOUND_S if backend.capabilities.can_abort else 1.0)
    aborter = threading.Timer(0.2, pair.communicators[0].abort)
    aborter.start()
    started = time.monotonic()
    with pytest.raises(CommunicatorError):
        pair.on(0, partial(summed, pair, 0))
    seconds = time.monotonic() - started
    aborter.join()
    assert seconds < (BOUND_S / 2 if backend.capabilities.can_abort else BOUND_S)


# ---------------------------------------------------------------- scripted faults


@pytest.fixture
def script_options(backend_name, backend_options, device):  # noqa: ARG001 - as it was, at the end
    """The options of a script of faults."""
    options = SCRIPTED.get(backend_name.partition(":")[0])
    if options is None:
        pytest.skip("not applicable: the backend's faults cannot be scripted")
    return lambda script: backend_options | options(script)


@pytest.fixture
def scripted(backend_name, script_options):
    """Opens chips of the backend with a script of faults: the runtime, and what it acquired."""
    opened = []

    def run(script, chips=1, wanted=1):
        config = BackendConfig(
            chip_indices=tuple(range(chips)),
            chips_on_host=chips,
            dtype="float32",
            options=script_options(script),
        )
        backend = find_backend(backend_name)
        backend.on_init(config)
        runtime = open_runtime(backend, config)
        acquired = runtime.acquire(wanted)
        opened.extend(acquired.granted)
        return runtime, acquired

    yield run
    for each in opened:
        each.close()


def product(runtime, device):
    x, weight = torch.arange(28.0).view(7, 4), torch.ones(5, 4)
    found = KernelCalls(runtime, device)("linear", x, weight, None, None)
    assert torch.equal(found, REFERENCE["linear"](x, weight, None, None))


def products(runtime, device):
    for _ in range(100):
        product(runtime, device)


def wait_for_products(runtime, device):
    table = runtime.bind_kernels(KERNELS)
    x, weight = device.to_chip(torch.ones(7, 4)), device.to_chip(torch.ones(5, 4))
    for _ in range(100):
        table.dispatch("linear", x, weight, None, None)
        device.fence().wait(timeout_s=0.5)


def allocate_into(kept, device):
    for _ in range(100):
        kept.append(device.allocate((1000,), torch.float32))
        device.synchronize()


def check_a_new_start_goes_well(scripted):
    runtime, acquired = scripted("")
    product(runtime, acquired.granted[0])


@pytest.mark.covers("chip error")
@pytest.mark.parametrize("point", ["launch=30", "copy=60"])
def test_a_chip_that_fails_says_so(scripted, point):
    runtime, acquired = scripted(f"error@{point}")
    with pytest.raises(DeviceError):
        products(runtime, acquired.granted[0])
    check_a_new_start_goes_well(scripted)


@pytest.mark.covers("chip hangs")
def test_a_chip_that_hangs_costs_the_deadline(scripted):
    runtime, acquired = scripted("hang@launch=30")
    started = time.monotonic()
    with pytest.raises(DeviceHung):
        wait_for_products(runtime, acquired.granted[0])
    assert time.monotonic() - started < BOUND_S
    check_a_new_start_goes_well(scripted)


@pytest.mark.covers("chip slow")
def test_a_slow_chip_is_right_all_the_same(scripted):
    runtime, acquired = scripted("slow@launch=1:x50")
    for _ in range(5):
        product(runtime, acquired.granted[0])


@pytest.mark.covers("chip dies")
def test_a_chip_that_dies_answers_no_more(scripted):
    runtime, acquired = scripted("death@launch=30")
    with pytest.raises(DeviceError):
        products(runtime, acquired.granted[0])
    with pytest.raises(DeviceError):
        product(runtime, acquired.granted[0])


@pytest.mark.covers("chip out of memory")
def test_memory_that_runs_out_once_is_one_error(scripted):
    runtime, acquired = scripted("oom@allocate=40")
    device = acquired.granted[0]
    kept = []
    with pytest.raises(OutOfMemory):
        allocate_into(kept, device)
    assert len(kept) < 40
    product(runtime, device)


@pytest.mark.covers("chip wrong")
def test_a_chip_that_multiplies_wrongly_is_not_taken(scripted):
    _, acquired = scripted("chip0:wrong@linear", chips=2)
    assert [device.chip.index for device in acquired.granted] == [1]
    assert "wrongly" in acquired.rejected[0]


@pytest.mark.covers("chip does not open")
def test_a_chip_that_does_not_open_is_rejected_and_the_next_is_taken(scripted):
    runtime, acquired = scripted("chip1:fail@open", chips=3, wanted=3)
    assert [device.chip.index for device in acquired.granted] == [0, 2]
    assert list(acquired.rejected) == [1]
    assert acquired.rejected[1]
    product(runtime, acquired.granted[1])


@pytest.mark.covers("peer's chip dies")
def test_a_chip_that_dies_in_a_group_frees_the_others(backend_name, script_options):
    ranks = LocalRanks(backend_name, 2, script_options("chip1:death@collective=5"))
    ranks.form(step_deadline_s=1.0)

    def run(rank):
        try:
            for _ in range(50):
                summed(ranks, rank)
        except (CommunicatorError, DeviceError) as error:
            return error
        return None

    started = time.monotonic()
    errors = ranks.together(run)
    assert time.monotonic() - started < BOUND_S
    assert isinstance(errors[0], CommunicatorError)
    assert errors[1] is not None
    ranks.close()
