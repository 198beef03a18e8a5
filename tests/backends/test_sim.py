"""What is particular to the sim backend: ids, options, lateness, workspaces, faults, transports."""

import gc
from contextlib import closing
from functools import partial

import pytest
import torch

from backends.errors import (
    BackendUnavailable,
    DeviceError,
    DeviceHung,
    DeviceLost,
    PeerLost,
    UnsupportedOperation,
)
from backends.interface import (
    BackendConfig,
    BatchRows,
    GroupPlace,
    KVSpec,
    Lifetime,
    Requirement,
    open_runtime,
)
from backends.plugin import ModelLoadPlan, find_backend
from backends.sim import runtime as sim_runtime
from backends.sim.attention import uniform_heads
from backends.sim.driver import RowLengths
from backends.simulator.clock import WallClock
from backends.simulator.kernel_rules import KernelRejected
from kernels.spec import OPERATIONS, SOFT_CAP, WINDOW
from tests.backends.local_ranks import LocalRanks

VARIANTS = ("ideal", "p800_shim", "xre_native", "adversarial")


def start(variant="ideal", devices=(), index=0, limit_bytes=None, **options):
    """A runtime after `on_init`; options with underscores for dashes, virtual time."""
    texts = {"pace": "off"} | {name.replace("_", "-"): str(text) for name, text in options.items()}
    config = BackendConfig(
        chip_indices=(index,),
        devices=devices,
        dtype="float32",
        memory_limit_bytes=limit_bytes,
        options=texts,
    )
    backend = find_backend(f"sim:{variant}")
    backend.on_init(config)
    return open_runtime(backend, config)


def open_chip(variant="ideal", **options):
    runtime = start(variant, **options)
    acquired = runtime.acquire(1)
    assert acquired.granted, acquired.rejected
    return runtime, acquired.granted[0]


def bind(runtime):
    layout = runtime.kv_layout(KVSpec(1, 1, 16, 16, torch.float32)).order
    return runtime.bind_kernels({name: Requirement("float32", layout) for name in OPERATIONS})


# ---------------------------------------------------------------- ids and options


def test_logical_numbers_follow_the_visible_devices_and_ids_stay_physical(monkeypatch):
    monkeypatch.setenv("SIM_VISIBLE_DEVICES", "3,5,6")
    runtime, device = open_chip(devices=("6", "3"), index=0)
    assert (device.chip.index, device.chip.device_id) == (0, "6")
    assert device.chip.description == "ideal chip 2, physical 6"
    assert [chip.device_id for chip in runtime.backend.select_chips(runtime.config)] == ["6", "3"]
    with pytest.raises(BackendUnavailable, match="no device '0'; devices of sim: 3, 5, 6"):
        start(devices=("0",)).acquire(1)


@pytest.mark.parametrize("visible", ["3,3", "0,8", "one", "1,"])
def test_a_bad_list_of_visible_devices_is_refused(monkeypatch, visible):
    monkeypatch.setenv("SIM_VISIBLE_DEVICES", visible)
    with pytest.raises(BackendUnavailable, match="must list ids from 0 to 7, each once"):
        start()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chip": "1"}, r"no option 'chip'; it has chips, communicator-host, .*seed"),
        ({"chips": "0"}, "whole number from 1 to 1024"),
        ({"chips": "many"}, "whole number from 1 to 1024"),
        ({"memory_bytes": "12"}, "whole number from 65536"),
        ({"execution": "later"}, "choose latest, earliest, random"),
        ({"pace": "yes"}, "choose on, off"),
        ({"faults": "error@nothing"}, "faults are written"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_can(options, said):
    with pytest.raises(BackendUnavailable, match=said):
        start(**options)


def test_options_make_the_host():
    runtime, device = open_chip(chips=2, memory_bytes=1 << 20, decode_rows_max=4)
    assert len(runtime.backend.select_chips(runtime.config)) == 2
    assert device.memory_info().total_bytes == 1 << 20
    assert runtime.backend.capabilities.rows_max == 4


# ---------------------------------------------------------------- order and capture


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_result_is_poison_until_the_host_waits(variant):
    runtime, device = open_chip(variant)
    x = device.to_chip(torch.ones(4, 64))
    product = bind(runtime).dispatch("linear", x, x, None, None)
    assert product.isnan().all()
    assert (device.to_host(product) == 64).all()


def test_a_tensor_of_the_host_is_refused():
    runtime, device = open_chip()
    with pytest.raises(DeviceError, match="copy it to the chip first"):
        bind(runtime).dispatch(
            "linear", torch.ones(4, 64), device.to_chip(torch.ones(4, 64)), None, None
        )


def layer_of(runtime, device):
    """A small layer of a model over paged keys and values: all that goes wrong without order."""
    generator = torch.Generator().manual_seed(5)
    kernels = bind(runtime)
    pool = runtime.create_memory_pool(device, KVSpec(1, 2, 16, 16, torch.float32), 6)
    rows = BatchRows((0, 1, 20), (33, 5), ((4, 0, 2), (1, 3)))
    weight = device.to_chip(torch.randn(5 * 16 + 64, 64, generator=generator) / 8)
    x = device.to_chip(torch.randn(20, 64, generator=generator))
    for context in ((0, 33, 38), (0, 1, 20)):
        bound = pool.bind(BatchRows(context, (0, 0), rows.block_tables) if context[1] > 1 else rows)
        keys = device.to_chip(torch.randn(context[-1], 2, 16, generator=generator))
        kernels.dispatch("write_kv", bound, 0, keys, keys)
    projected = kernels.dispatch("linear", x, weight, None, None)
    query = projected[:, : 5 * 16].view(20, 5, 16)
    attended = kernels.dispatch(
        "attention", pool.bind(rows), 0, query, (0, 0, 0, 0, 1), 0.25, 0, 0.0
    )
    gated = kernels.dispatch("silu_mul", projected[:, 80:])
    result = device.to_host(attended), device.to_host(gated)
    pool.close()
    return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_do_not_depend_on_when_work_is_done(variant):
    expected = layer_of(*open_chip("ideal", execution="earliest"))
    for execution in ("latest", "earliest", "random"):
        found = layer_of(*open_chip(variant, execution=execution, seed=3))
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_a_capture_records_launches_and_refuses_the_host():
    runtime, device = open_chip()
    kernels = bind(runtime)
    x, total = device.to_chip(torch.ones(2, 8)), device.to_chip(torch.zeros(2, 8))
    ones = device.to_chip(torch.ones(8))
    program = device.capture(lambda: device.copy(kernels.dispatch("rms_norm", x, ones, 0.0), total))
    assert device.to_host(total).sum() == 0
    device.copy(torch.full((2, 8), -3.0), x)
    program.replay()
    assert (device.to_host(total) == -1).all()
    with pytest.raises(UnsupportedOperation, match="a copy from the host cannot be captured"):
        device.capture(lambda: device.copy(torch.ones(2, 8), x))
    assert (device.to_host(x) == -3).all()


# ---------------------------------------------------------------- what the kernels refuse


def test_heads_are_padded_to_as_many_a_key_head():
    assert uniform_heads((0, 0, 1, 1), 2).is_identity
    uneven = uniform_heads((0, 0, 0, 0, 1), 2)
    assert uneven.filled == (0, 1, 2, 3, 4, -1, -1, -1)
    assert uneven.places == (0, 1, 2, 3, 4)
    assert uniform_heads((1, 0, 1, 0, 0), 2).places == (3, 0, 4, 1, 2)


def test_the_drivers_own_calls_reject_what_adapters_make_right():
    runtime, device = open_chip("p800_shim")
    wide = device.to_chip(torch.ones(4, 12))
    ids = device.to_chip(torch.zeros(4, dtype=torch.int64))
    weight, output = device.to_chip(torch.ones(8)), device.allocate((4, 8), torch.float32)
    with pytest.raises(KernelRejected, match="not contiguous; copy it"):
        device.driver.rmsnorm(wide[:, :8], weight, output, 1e-5)
    with pytest.raises(KernelRejected, match="expected Int but found Long"):
        device.driver.embedding(ids, wide, 0, output)
    with pytest.raises(
        KernelRejected, match="takes 24 bytes, which is not a multiple of 16; pad it"
    ):
        device.driver.swiglu(device.to_chip(torch.ones(4, 6)), device.to_chip(torch.ones(4, 3)))
    normed = bind(runtime).dispatch("rms_norm", wide[:, :8], weight, 0.0)
    assert (device.to_host(normed) == 1).all()


def test_a_batch_above_the_kernels_limit_is_split():
    runtime, device = open_chip(decode_rows_max=3)
    pool = runtime.create_memory_pool(device, KVSpec(1, 1, 16, 16, torch.float32), 8)
    rows = BatchRows(tuple(range(9)), (0,) * 8, tuple((block,) for block in range(8)))
    values = torch.arange(8.0)[:, None, None].expand(8, 1, 16).contiguous()
    kernels, bound, on_chip = bind(runtime), pool.bind(rows), device.to_chip(values)
    kernels.dispatch("write_kv", bound, 0, on_chip, on_chip)
    launches = device.simulated.statistics().launches
    attended = kernels.dispatch("attention", bound, 0, on_chip, (0,), 1.0, 0, 0.0)
    assert torch.equal(device.to_host(attended), values)
    assert device.simulated.statistics().launches - launches == 3


# ---------------------------------------------------------------- what the library lacks

LIBRARY, FORMULA = "sim-driver", "sim-formula"


@pytest.mark.parametrize(
    ("variant", "window", "soft_cap", "gelu"),
    [
        ("ideal", LIBRARY, LIBRARY, LIBRARY),
        ("p800_shim", LIBRARY, FORMULA, FORMULA),
        ("xre_native", FORMULA, FORMULA, FORMULA),
        ("adversarial", FORMULA, FORMULA, FORMULA),
    ],
)
def test_what_the_library_lacks_is_computed_by_formula(variant, window, soft_cap, gelu):
    runtime = start(variant)

    def chosen(operation, *features):
        requirement = Requirement("float32", layout="paged", features=features)
        return runtime.bind_kernels({operation: requirement}).choices[operation]

    assert chosen("attention").implementation == LIBRARY
    assert chosen("attention", WINDOW).implementation == window
    assert chosen("attention", SOFT_CAP).implementation == soft_cap
    assert chosen("gelu_mul").implementation == gelu
    assert chosen("soft_cap").implementation == FORMULA
    if soft_cap == FORMULA:
        why = dict(chosen("attention", SOFT_CAP).rejected)[LIBRARY]
        assert why == "it does not compute soft_cap"


def windowed(runtime, device):
    """A row at position 40 with a window of 20: the first block is given back, another's now."""
    requirement = Requirement("float32", layout="paged", features=(WINDOW, SOFT_CAP))
    attention = runtime.bind_kernels({"attention": requirement}).function("attention")
    write = bind(runtime).function("write_kv")
    pool = runtime.create_memory_pool(device, KVSpec(1, 1, 16, 16, torch.float32), 3)
    values = torch.arange(16.0, 41.0)[:, None, None].expand(25, 1, 16).contiguous()
    on_chip = device.to_chip(values)
    write(pool.bind(BatchRows((0, 25), (16,), ((2, 0),), (16,))), 0, on_chip, on_chip)
    last = pool.bind(BatchRows((0, 1), (40,), ((2, 0),), (16,)))
    query = device.to_chip(torch.zeros(1, 1, 16))
    return attention(last, 0, query, (0,), 1.0, 20, 0.5), pool


@pytest.mark.parametrize("execution", ["latest", "earliest", "random"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_formula_is_as_late_as_a_kernel_and_reads_what_is_there_then(variant, execution):
    runtime, device = open_chip(variant, execution=execution)
    attended, pool = windowed(runtime, device)
    if execution == "latest":
        assert attended.isnan().all()
    # The mean of the values 21 .. 40: all scores are alike.
    torch.testing.assert_close(device.to_host(attended), torch.full((1, 1, 16), 30.5))
    pool.close()


@pytest.mark.parametrize("variant", ["p800_shim", "adversarial"])
def test_formulas_are_launches_that_can_be_wrong_and_captured(variant):
    runtime, device = open_chip(variant, faults="wrong@soft_cap=2")
    kernels, logits = bind(runtime), device.to_chip(torch.full((2, 8), 1.0))
    capped = [device.to_host(kernels.dispatch("soft_cap", logits, 1.0)) for _ in range(2)]
    expected = torch.full((2, 8), 1.0).tanh()
    torch.testing.assert_close(capped[0], expected)
    torch.testing.assert_close(capped[1], 1 - expected)
    gate_up, total = device.to_chip(torch.ones(2, 6)), device.to_chip(torch.zeros(2, 3))
    program = device.capture(lambda: device.copy(kernels.dispatch("gelu_mul", gate_up), total))
    program.replay()
    assert (device.to_host(total) > 0.84).all()


def test_the_library_refuses_what_it_lacks():
    _, device = open_chip("xre_native")
    x = device.to_chip(torch.ones(2, 8))
    with pytest.raises(KernelRejected, match="has no kernel gelu_tanh_and_mul"):
        device.driver.gelu_tanh_and_mul(x, x)
    lengths = RowLengths((0, 2), (0,), x)
    for wanted, said in (({"swa_left": 4}, "window"), ({"logits_soft_cap": 1.0}, "soft cap")):
        with pytest.raises(KernelRejected, match=f"prefill attention has no {said}"):
            device.driver.prefill_attention(x[None], x, x, x, lengths, 1.0, x, **wanted)


def test_work_is_counted_within_the_window():
    lengths = RowLengths((0, 1, 6), (9, 2), torch.empty(0))
    assert (lengths.seen_tokens(0), lengths.pairs(0)) == (9 + 1 + 2 + 5, 10 + 3 + 4 + 5 + 6 + 7)
    assert (lengths.seen_tokens(4), lengths.pairs(4)) == (3 + 1 + 2 + 5, 4 + 3 + 4 + 4 + 4 + 4)


# ---------------------------------------------------------------- memory the kernels keep


def norms_of_many_shapes(runtime, device, shapes):
    kernels, weight = bind(runtime), device.to_chip(torch.ones(8))
    for rows in range(1, shapes + 1):
        kernels.dispatch("rms_norm", device.to_chip(torch.ones(rows, 8)), weight, 1e-5)
    device.synchronize()
    gc.collect()


def test_what_kernels_keep_per_shape_ends_with_a_request():
    runtime, device = open_chip("p800_shim")
    free_bytes = device.memory_info().free_bytes
    norms_of_many_shapes(runtime, device, 40)
    assert device.memory_info().free_bytes <= free_bytes - 40 * (16 << 10)
    device.reclaim(Lifetime.STEP)
    assert device.memory_info().free_bytes < free_bytes
    device.reclaim(Lifetime.REQUEST)
    assert device.memory_info().free_bytes >= free_bytes


def test_a_planted_leak_is_not_reclaimed():
    runtime, device = open_chip(faults="leak@rms_norm")
    free_bytes = device.memory_info().free_bytes
    norms_of_many_shapes(runtime, device, 10)
    device.reclaim(Lifetime.MODEL)
    assert device.memory_info().free_bytes == free_bytes - 10 * (16 << 10)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(("kind", "error"), [("fail", "fails at open"), ("hang", "hangs at open")])
def test_a_chip_that_does_not_open_is_rejected_with_the_reason(kind, error):
    acquired = start(faults=f"chip0:{kind}@open").acquire(1)
    assert not acquired.granted
    assert error in acquired.rejected[0]


def test_a_chip_can_fail_when_a_model_is_loaded():
    runtime, device = open_chip(faults="hang@load")
    with pytest.raises(DeviceHung, match="hangs at load"):
        runtime.backend.on_model_load(ModelLoadPlan("llama", 1, 0, 1))
    device.close()
    runtime.backend.on_model_load(ModelLoadPlan("llama", 1, 0, 1))


class StillWaiting(BaseException):
    """Nothing of the backend may catch it."""


@pytest.mark.parametrize("stage", ["open", "load"])
def test_in_real_time_a_chip_that_hangs_does_not_come_back_by_itself(monkeypatch, stage):
    """An hour is enough: who waits for it must have a deadline of his own."""
    passed_s = [0.0]

    def sleep(seconds):
        passed_s[0] += seconds
        if passed_s[0] > 3600:
            raise StillWaiting

    monkeypatch.setattr(sim_runtime, "WallClock", partial(WallClock, lambda: passed_s[0], sleep))
    runtime = start(faults=f"hang@{stage}", pace="on")

    def run():
        (device,) = runtime.acquire(1).granted
        with closing(device):
            runtime.backend.on_model_load(ModelLoadPlan("llama", 1, 0, 1))

    with pytest.raises(StillWaiting):
        run()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_write_spoils_what_it_writes_and_nothing_else(variant):
    runtime, device = open_chip(variant, faults="wrong@write_kv=2")
    kernels = bind(runtime)
    pool = runtime.create_memory_pool(device, KVSpec(1, 1, 16, 16, torch.float32), 2)
    ones = device.to_chip(torch.ones(1, 1, 16))
    found = []
    for block in range(2):
        bound = pool.bind(BatchRows((0, 1), (0,), ((block,),)))
        kernels.dispatch("write_kv", bound, 0, ones, device.to_chip(torch.full((1, 1, 16), 3.0)))
    for block in range(2):
        bound = pool.bind(BatchRows((0, 1), (0,), ((block,),)))
        attended = kernels.dispatch("attention", bound, 0, ones, (0,), 1.0, 0, 0.0)
        found.append(device.to_host(attended).unique().tolist())
    assert found == [[3.0], [-2.0]]
    pool.close()


def test_a_failed_launch_loses_the_chip_when_it_is_waited_for():
    runtime, device = open_chip(faults="error@launch=2")  # the first is the probe's
    x = device.to_chip(torch.ones(4, 64))
    bind(runtime).dispatch("linear", x, x, None, None)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="linear failed: scripted fault"):
            device.synchronize()


# ---------------------------------------------------------------- two transports


@pytest.fixture
def staged(monkeypatch):
    """Ranks that believe they are in processes of their own."""
    monkeypatch.setattr(sim_runtime, "in_one_process", lambda *_: False)


@pytest.fixture
def pair(request):
    variant, options = request.param
    ranks = LocalRanks(f"sim:{variant}", 2, {"pace": "off", **options})
    yield ranks
    ranks.close()


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("pair", [(variant, {}) for variant in VARIANTS], indirect=True)
def test_staged_collectives_carry_what_was_asked_before(pair):
    """Each contribution is the result of a kernel that has not run when it is given."""
    pair.form()

    def run(rank):
        device, communicator = pair.devices[rank], pair.communicators[rank]
        x = device.to_chip(torch.full((2, 64), float(rank + 1)))
        kernels = bind(pair.runtimes[rank])
        own = kernels.dispatch("linear", x, x, None, None)
        communicator.all_reduce(own).wait_stream()
        doubled = kernels.dispatch("linear", own, own, None, None)
        gathered = device.allocate((2, 2, 2), torch.float32)
        communicator.all_gather(doubled, gathered).wait()
        part = device.allocate((2, 2), torch.float32)
        communicator.reduce_scatter(gathered, part).wait()
        if rank == 0:
            communicator.send(part, 1).wait()
        else:
            communicator.receive(part, 0).wait()
        communicator.broadcast(own, 1).wait()
        return [device.to_host(each)[0].flatten().tolist() for each in (own, gathered, part)]

    total = 64.0 + 4 * 64.0
    for own, gathered, part in pair.together(run):
        assert own == [total] * 2
        assert gathered == [2 * total**2] * 4
        assert part == [4 * total**2] * 2


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("pair", [("ideal", {"faults": "chip1:error@collective=1"})], indirect=True)
def test_a_staged_collective_meets_the_faults_planted_at_it(pair):
    pair.form(step_deadline_s=1.0)
    device, communicator = pair.devices[1], pair.communicators[1]
    with pytest.raises(DeviceLost, match="all_reduce failed: scripted fault"):
        communicator.all_reduce(device.to_chip(torch.ones(4))).wait()
    communicator.close()
    with pytest.raises(PeerLost):
        pair.communicators[0].all_reduce(pair.devices[0].to_chip(torch.ones(4))).wait()


@pytest.mark.parametrize("pair", [("ideal", {})], indirect=True)
def test_threads_of_a_process_meet_in_the_fabric(pair):
    """The time of a sum is the fabric's: both chips have a collective of the same length."""
    pair.form()

    def run(rank):
        tensor = pair.devices[rank].to_chip(torch.ones(1000))
        pair.communicators[rank].all_reduce(tensor).wait()
        return pair.devices[rank].simulated.statistics()

    first, second = pair.together(run)
    assert first.collectives == second.collectives == 1
    assert first.communication_s == second.communication_s > 40e-6


def test_a_chip_can_fail_at_the_first_collective_only():
    ranks = LocalRanks("sim", 2, {"pace": "off", "faults": "chip1:fail@probe_collective"})
    ranks.form()
    tensors = [device.to_chip(torch.ones(4)) for device in ranks.devices]
    with pytest.raises(DeviceError, match="chip 1 fails at probe_collective"):
        ranks.communicators[1].all_reduce(tensors[1])
    ranks.close()


def test_a_group_of_one_copies_in_order():
    runtime, device = open_chip()
    place = GroupPlace(0, 1, "alone", join_deadline_s=1.0, step_deadline_s=1.0)
    communicator = runtime.create_communicator(device, place, b"")
    x = device.to_chip(torch.ones(3, 64))
    product = bind(runtime).dispatch("linear", x, x, None, None)
    gathered = device.allocate((1, 3, 3), torch.float32)
    communicator.all_gather(product, gathered).wait_stream()
    assert (device.to_host(gathered) == 64).all()
