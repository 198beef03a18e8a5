"""What is particular to the cpu backend: cores as chips, and what the host says of itself."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends.cpu import plugin
from backends.cpu.host import has_bfloat16, host_memory
from backends.cpu.options import INSTRUCTIONS
from backends.cpu.plugin import CpuBackend
from backends.errors import BackendUnavailable
from backends.interface import BatchRows, KVSpec, Lifetime, Requirement, open_runtime
from backends.plugin import BackendConfig, ChipDescription
from kernels.library import LibraryUnusable
from kernels.spec import WINDOW


def chips(monkeypatch, cores, chips_on_host):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    config = BackendConfig(chip_indices=(0,), chips_on_host=chips_on_host)
    return [chip.cores for chip in CpuBackend().enumerate_chips(config)]


@pytest.mark.parametrize(
    ("cores", "chips_on_host", "expected"),
    [
        (range(4), 1, [(0, 1, 2, 3)]),
        (range(4), 2, [(0, 1), (2, 3)]),
        (range(5), 2, [(0, 1), (2, 3)]),
        ((1, 5, 6), 3, [(1,), (5,), (6,)]),
        ((2, 7), 3, [(2,), (7,), (2,)]),
    ],
)
def test_cores_are_divided_among_chips(monkeypatch, cores, chips_on_host, expected):
    assert chips(monkeypatch, cores, chips_on_host) == expected


@pytest.mark.usefixtures("device")
def test_opening_a_chip_pins_the_process_and_keeps_the_enumeration():
    backend = CpuBackend()
    config = BackendConfig(chip_indices=(1,), chips_on_host=2)
    before = os.sched_getaffinity(0)
    granted = backend.on_device_acquire(config).granted
    open_runtime(backend, config).open_device(granted[0])
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            assert os.sched_getaffinity(int(thread.name)) == set(granted[0].cores)
    assert torch.get_num_threads() == len(granted[0].cores)
    assert backend.on_device_acquire(config).granted == granted
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), before)
    torch.set_num_threads(len(before))


def test_programs_need_the_native_kernels(monkeypatch):
    def can_capture(**options):
        backend = CpuBackend()
        backend.on_init(BackendConfig(chip_indices=(0,), options=options))
        return backend.capabilities.can_capture

    library = SimpleNamespace(polychip_best_instructions=lambda: 0)
    monkeypatch.setattr(plugin, "open_library", lambda: library)
    assert can_capture()
    assert can_capture(kernels="portable")
    assert not can_capture(kernels="torch")

    def missing():
        raise LibraryUnusable("not built")

    monkeypatch.setattr(plugin, "open_library", missing)
    assert not can_capture()


def test_a_decode_row_gathers_only_what_its_window_reaches(runtime, device):
    """30 000 tokens of context, of which all but the last 33 blocks are where no memory is."""
    pool = runtime.create_memory_pool(device, KVSpec(1, 1, 16, 16, torch.float32), 33)
    bound = pool.bind(BatchRows((0, 1), (30_000,), ((0,) * 1843 + tuple(range(33)),)))
    bound.block_tables[:, :1843] = 1 << 40
    features = Requirement("float32", layout=pool.layout.order, features=(WINDOW,))
    attention = runtime.bind_kernels({"attention": features}).function("attention")
    ask = partial(attention, bound, 0, torch.zeros(1, 1, 16), (0,), 1.0)
    assert ask(512, 0.0).shape == (1, 1, 16)
    with pytest.raises(IndexError):
        ask(0, 0.0)
    device.scratch.reclaim(Lifetime.STEP)
    pool.close()


def test_a_chip_of_another_make_is_refused():
    runtime = open_runtime(CpuBackend(), BackendConfig(chip_indices=(0,)))
    with pytest.raises(BackendUnavailable, match="not a set of cores"):
        runtime.open_device(ChipDescription(0, "abacus"))


def test_no_chips_are_refused():
    with pytest.raises(BackendUnavailable, match="chips on host is 0"):
        CpuBackend().on_init(BackendConfig(chip_indices=(), chips_on_host=0))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("kernel", "torch", "has no option 'kernel'; it has kernels, collectives"),
        ("kernels", "fast", "kernels is 'fast'; choose auto, torch, portable, avx2"),
        ("collectives", "tcp", "collectives is 'tcp'; choose auto, shared-memory, gloo"),
    ],
)
def test_options_it_does_not_know_are_refused_before_torch(name, value, says):
    with pytest.raises(BackendUnavailable, match=says):
        CpuBackend().on_init(BackendConfig(chip_indices=(0,), options={name: value}))


def test_the_options_it_knows_are_taken():
    options = {"kernels": "portable", "collectives": "gloo", "communicator-host": "here"}
    CpuBackend().on_init(BackendConfig(chip_indices=(0,), options=options))


@pytest.mark.parametrize(
    ("hardware", "best", "kernels", "first"),
    [
        (True, "avx512", "torch", "bfloat16"),
        (True, "amx", "auto", "bfloat16"),
        (False, "avx2", "auto", "bfloat16"),
        (False, "avx2", "avx2", "bfloat16"),
        (False, "avx2", "portable", "float32"),
        (False, "avx2", "torch", "float32"),
        (False, "portable", "auto", "float32"),
        (False, None, "auto", "float32"),
    ],
)
def test_auto_takes_bfloat16_where_the_kernels_are_no_slower_with_it(
    monkeypatch, hardware, best, kernels, first
):
    """best: the instructions of the machine; None without native kernels."""

    def library():
        if best is None:
            raise LibraryUnusable("not built")
        return SimpleNamespace(polychip_best_instructions=lambda: INSTRUCTIONS.index(best))

    monkeypatch.setattr(plugin, "has_bfloat16", lambda: hardware)
    monkeypatch.setattr(plugin, "open_library", library)
    backend = CpuBackend()
    backend.on_init(BackendConfig(chip_indices=(0,), options={"kernels": kernels}))
    assert backend.capabilities.dtypes[0] == first
    assert sorted(backend.capabilities.dtypes) == ["bfloat16", "float32"]


def test_auto_is_the_first_dtype_of_the_backend():
    backend, config = CpuBackend(), BackendConfig(chip_indices=(0,))
    backend.on_init(config)
    runtime = open_runtime(backend, config)
    assert str(runtime.dtype()) == f"torch.{backend.capabilities.dtypes[0]}"


def test_cpuinfo_tells_of_bfloat16(tmp_path: Path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 sse\n")
    assert has_bfloat16(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx512f sse\n")
    assert not has_bfloat16(cpuinfo)


def test_a_container_has_what_its_control_group_leaves(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:   700 kB\n")
    assert host_memory(meminfo, tmp_path) == (1_024_000, 716_800)
    (tmp_path / "memory.current").write_text("100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path) == (1_024_000, 716_800)
    (tmp_path / "memory.max").write_text("400000\n")
    assert host_memory(meminfo, tmp_path) == (400_000, 300_000)
