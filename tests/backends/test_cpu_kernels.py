"""The native kernels of the cpu backend, in every set of instructions that this machine has."""

import dataclasses
import gc
import itertools
import mmap
import random
from pathlib import Path

import pytest
import torch

from backends.cpu.device import CpuDevice
from backends.cpu.host import CpuChip
from backends.cpu.kernel_library import Engine, PackedMatrix, load_library
from backends.cpu.native_kernels import NativeKernels
from backends.cpu.options import INSTRUCTIONS
from backends.cpu.plugin import CpuBackend
from backends.errors import BackendUnavailable, OutOfMemory
from backends.interface import BackendConfig, Requirement, open_runtime
from kernels.paged_kv import PagedKV
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from tests.backends.kernel_calls import check_close

MIB = 1 << 20
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}
THREADS = 2
SHAPES = [(1, 1), (5, 1), (33, 7), (96, 64), (192, 576), (31, 1000), (1000, 577)]
# Twice the rounding of a result, over sums of some hundred terms that were rounded once each.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def available():
    try:
        return INSTRUCTIONS[: load_library().polychip_best_instructions() + 1]
    except BackendUnavailable:
        return ()


pytestmark = pytest.mark.skipif(not available(), reason="the native kernels are not built")


@pytest.fixture(scope="module", params=available())
def engine(request):
    return Engine(THREADS, request.param)


every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def linear(engine, x, matrix, bias, dtype):
    """In `dtype`, that of the operands or, without a bias, float32."""
    kernels = NativeKernels(engine, None)
    if dtype == x.dtype:
        return kernels.linear(x, matrix, bias, None)
    assert bias is None
    return kernels.logits(x, matrix)


def packed(engine, rows):
    matrix = PackedMatrix(engine, rows.shape, rows.dtype)
    matrix.write(0, rows)
    return matrix


def numbers(dtype, *shape):
    return torch.randn(shape).to(dtype)


def beside_nan(dtype, rows, columns):
    """Rows whose neighbours in memory are NaN."""
    wide = torch.full((rows, columns + 3), float("nan"), dtype=dtype)
    wide[:, :columns] = numbers(dtype, rows, columns)
    return wide[:, :columns]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 12, 13, 16, 17, 32, 33, 129])
def test_products_are_right(engine, dtype, shape, rows):
    torch.manual_seed(rows)
    weight, bias = numbers(dtype, *shape), numbers(dtype, shape[0])
    matrix, x = packed(engine, weight), beside_nan(dtype, rows, shape[1])
    right = x.double() @ weight.double().T
    for added, each in ((0.0, None), (bias.double(), bias)):
        expected = right + added
        found = linear(engine, x, matrix, each, dtype)
        assert found.dtype == dtype
        error = (found.double() - expected).abs() / (expected.abs() + shape[1] ** 0.5)
        assert (error < TOLERANCES[dtype]).all()
    wide = linear(engine, x, matrix, None, torch.float32)
    error = (wide.double() - right).abs() / (right.abs() + shape[1] ** 0.5)
    assert (error < 1e-5).all(), "sums are float32 whatever the operands are"


@every_dtype
@pytest.mark.parametrize("shape", [(96, 64), (33, 577)])
def test_a_row_does_not_depend_on_the_others(engine, dtype, shape):
    matrix, x = packed(engine, numbers(dtype, *shape)), numbers(dtype, 129, shape[1])
    together = linear(engine, x, matrix, None, torch.float32)
    for first, count in ((0, 1), (3, 2), (7, 16), (50, 33), (100, 29)):
        alone = linear(engine, x[first : first + count], matrix, None, torch.float32)
        assert torch.equal(alone, together[first : first + count])


@every_dtype
def test_a_product_does_not_depend_on_the_threads(engine, dtype):
    weight, x = numbers(dtype, 500, 96), numbers(dtype, 9, 96)
    alone = Engine(1, engine.instructions)
    crowd = Engine(6, engine.instructions)
    results = [
        linear(each, x, packed(each, weight), None, dtype) for each in (engine, alone, crowd)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("spin_ns", [0, 1_000, 1_000_000], ids=["sleep", "tire", "spin"])
@pytest.mark.parametrize("threads", [2, 6])
def test_many_products_one_after_the_other(engine, threads, spin_ns):
    """Threads that sleep, spin or are late: none leaves a panel out or computes one too late."""
    crowd = Engine(threads, engine.instructions, spin_ns)
    rng = random.Random(f"{engine.instructions} {threads} {spin_ns}")
    matrices = [packed(crowd, numbers(torch.float32, size, 48)) for size in (1, 40, 300, 1000)]
    expected = {}
    for _ in range(1000):
        matrix = rng.choice(matrices)
        rows = rng.choice((0, 1, 3))
        x = torch.arange(rows * 48, dtype=torch.float32).view(rows, 48) % 7
        found = linear(crowd, x, matrix, None, torch.float32)
        assert torch.equal(found, expected.setdefault((matrix.address, rows), found))


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_read_as_they_were_written(engine, dtype, shape):
    weight = numbers(dtype, *shape)
    matrix = PackedMatrix(engine, shape, dtype)
    for first in range(0, shape[0], 7):
        matrix.write(first, weight[first : first + 7])
    chosen = torch.randint(shape[0], (20,))
    assert torch.equal(matrix.read(chosen), weight[chosen])
    assert torch.equal(matrix.read(torch.arange(shape[0])), weight)


@every_dtype
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 0.0, 1e-30])
def test_special_numbers_stay_in_their_rows(engine, dtype, special):
    weight, x = numbers(dtype, 40, 64).abs() + 0.1, numbers(dtype, 3, 64)
    x[1, 5] = special
    found = linear(engine, x, packed(engine, weight), None, dtype)
    assert torch.isfinite(found[[0, 2]]).all()
    expected = x[1].double() @ weight.double().T
    assert torch.equal(torch.isnan(found[1]), torch.isnan(expected))
    assert torch.equal(torch.isinf(found[1]), torch.isinf(expected))


OPERANDS = {
    "rms_norm": lambda dtype: (numbers(dtype, 600, 80), numbers(dtype, 80), 1e-5),
    "add_rms_norm": lambda dtype: (
        numbers(dtype, 600, 80),
        numbers(torch.float32, 600, 80),
        numbers(dtype, 80),
        1e-5,
    ),
    "rotary": lambda dtype: (
        numbers(dtype, 500, 3, 40),
        torch.randint(100, (500,)),
        numbers(torch.float32, 100, 40),
    ),
    "silu_mul": lambda dtype: (7 * numbers(dtype, 400, 2 * 90),),
    "gelu_mul": lambda dtype: (7 * numbers(dtype, 400, 2 * 90),),
}
"""Rows enough for several items."""


@every_dtype
@pytest.mark.parametrize("operation", OPERANDS)
def test_operations_on_rows_are_right(engine, dtype, operation):
    operands = OPERANDS[operation](dtype)
    kernels = {
        each.operation: each.function for each in NativeKernels(engine, None).implementations()
    }
    found, expected = kernels[operation](*operands), REFERENCE[operation](*operands)
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)
    for one, right in zip(found, expected, strict=True):
        check_close(one, right, right.dtype if right.dtype == dtype else dtype)


def test_exponentials_are_right_to_the_ends_of_their_range(engine):
    """silu(x) / x is 1 / (1 + e^-x)."""
    x = torch.tensor(
        [-200, -88.72, -88.3, -87.4, -87.3, -50, -1, -1e-3, 1e-3, 1, 50, 87, 88.5, 200]
    )
    x = torch.cat([x, torch.linspace(-88, 88, 4001)])
    found = NativeKernels(engine, None).silu_mul(torch.cat([x, torch.ones_like(x)])[None])[0]
    expected = (x.double() * torch.sigmoid(x.double())).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-37)


def paged(dtype, batch, head_size=16, kv_heads=2):
    """A cache of one layer for rows of (tokens in context, queries), and its queries."""
    counts = [-(-(context + queries) // 16) for context, queries in batch]
    arena = numbers(dtype, sum(counts), 2, 16, kv_heads, head_size)
    order, tables = torch.randperm(sum(counts)), torch.zeros(len(batch), max(counts)).long()
    for row, (count, taken) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
        tables[row, :count] = order[taken - count : taken]
    starts = [0, *itertools.accumulate(queries for _, queries in batch)]
    nowhere = torch.zeros(starts[-1], dtype=torch.int64)
    contexts = tuple(context for context, _ in batch)
    return PagedKV(
        (arena[:, 0],),
        (arena[:, 1],),
        tables,
        nowhere,
        nowhere,
        tuple(starts),
        contexts,
        (0,) * len(batch),
    )


HEADS = (0, 0, 0, 1)


@every_dtype
@pytest.mark.parametrize("threads", [1, 2, 6])
def test_attention_of_a_token_does_not_depend_on_its_company(engine, dtype, threads):
    """Decoded alone, its context shared by several threads; among others; behind others."""
    cache, query = paged(dtype, [(700, 8), (130, 1), (5, 3)]), numbers(dtype, 12, 4, 16)
    kernels = NativeKernels(Engine(threads, engine.instructions), None)
    together = kernels.attention(cache, 0, query, HEADS, 0.25, 0, 0.0)
    for token, (row, position) in {0: (0, 700), 4: (0, 704), 7: (0, 707), 8: (1, 130)}.items():
        alone = dataclasses.replace(
            cache,
            block_tables=cache.block_tables[row : row + 1],
            query_starts=(0, 1),
            context_starts=(position,),
            table_starts=(0,),
            step_cache={},
        )
        found = kernels.attention(alone, 0, query[token : token + 1], HEADS, 0.25, 0, 0.0)
        assert torch.equal(found[0], together[token])


@every_dtype
def test_attention_is_right_in_all_instructions(engine, dtype):
    batch = [(126, 4), (127, 1), (128, 8), (300, 2), (0, 5)]
    for head_size, window, soft_cap in ((16, 0, 0.0), (64, 20, 0.0), (128, 0, 2.0), (40, 130, 0.0)):
        cache = paged(dtype, batch, head_size)
        query = numbers(dtype, 20, 4, head_size)
        operands = (cache, 0, query, HEADS, 0.25, window, soft_cap)
        found = NativeKernels(engine, None).attention(*operands)
        check_close(found, REFERENCE["attention"](*operands), dtype)


@every_dtype
def test_scores_of_minus_infinity_are_weights_of_zero(engine, dtype):
    """The first group of keys is never looked at."""
    cache, query = paged(dtype, [(40, 1)]), torch.ones(1, 4, 16, dtype=dtype)
    for block in cache.block_tables[0, :1]:
        cache.keys[0][block, :, :, 0] = -torch.inf
    operands = (cache, 0, query, HEADS, 0.25, 0, 0.0)
    check_close(
        NativeKernels(engine, None).attention(*operands), REFERENCE["attention"](*operands), dtype
    )


def test_memory_of_matrices_that_are_gone_is_given_back(engine):
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    ones = torch.ones(4096, 4096)
    gc.collect()
    before = resident_bytes()
    for _ in range(3):
        matrices = [packed(engine, ones) for _ in range(2)]
        gc.collect()
        held = resident_bytes()
        del matrices
        gone = resident_bytes()
        # Not held less before: what other tests left may go meanwhile.
        assert held - gone > 120 * MIB
        assert gone - before < 20 * MIB


@pytest.mark.parametrize("block", [-1, 1 << 40])
def test_blocks_that_are_not_there_are_refused(engine, block):
    cache, kernels = paged(torch.float32, [(40, 1)]), NativeKernels(engine, None)
    cache.block_tables[0, 1] = block
    with pytest.raises(IndexError, match="block"):
        kernels.attention(cache, 0, torch.zeros(1, 4, 16), HEADS, 1.0, 0, 0.0)
    cache.token_blocks[0] = block
    before = cache.keys[0].clone()
    with pytest.raises(IndexError, match="place"):
        kernels.write_kv(cache, 0, torch.ones(1, 2, 16), torch.ones(1, 2, 16))
    assert torch.equal(cache.keys[0], before)
    with pytest.raises(IndexError, match="rows"):
        packed(engine, torch.ones(3, 4)).read(torch.tensor([0, block]))


def test_what_a_matrix_takes_counts_until_it_is_gone(engine):
    cores = tuple(sorted(CpuBackend()._cores))
    device = CpuDevice(CpuChip(0, "cores", 1 << 30, "", cores), 4 * MIB, engine)
    assert device.memory_info().free_bytes == 4 * MIB
    matrix = device.to_matrix(torch.zeros(33, 8192))
    assert device.memory_info().free_bytes == 4 * MIB - matrix.nbytes
    assert matrix.nbytes == device.matrix_bytes((33, 8192), torch.float32) == 64 * 8192 * 4
    with pytest.raises(OutOfMemory, match=r"matrix of \(33, 16384\).*its limit is"):
        device.allocate_matrix((33, 16384), torch.float32)
    del matrix
    gc.collect()
    assert device.memory_info().free_bytes == 4 * MIB


def runtime_with(option):
    backend = CpuBackend()
    config = BackendConfig(chip_indices=(0,), options={"kernels": option})
    backend.on_init(config)
    return open_runtime(backend, config)


@pytest.mark.parametrize("option", ["auto", "torch", "portable"])
def test_the_option_says_what_computes(option):
    runtime = runtime_with(option)
    asked = {"linear": Requirement("float32", rows=1, last_dimension=64)}
    told = runtime.bind_kernels(asked).choices["linear"].implementation
    (device,) = runtime.acquire(1).granted
    kernels = runtime.bind_kernels(asked)
    name = kernels.choices["linear"].implementation
    assert told == name, "also before a chip is open, as `polychip doctor` asks"
    assert name == ("torch" if option == "torch" else f"native, {known_as(option)}")
    x, weight = torch.randn(3, 64), torch.randn(5, 64)
    product = kernels.dispatch("linear", x, device.to_matrix(weight), None, None)
    torch.testing.assert_close(product, x @ weight.T)


def known_as(option):
    return available()[-1] if option == "auto" else option


def test_instructions_the_machine_has_not_are_refused(monkeypatch):
    monkeypatch.setattr(load_library(), "polychip_best_instructions", lambda: 0)
    with pytest.raises(BackendUnavailable, match=r"has no instructions 'amx'; it has portable$"):
        Engine(THREADS, "amx")
    assert Engine(THREADS).instructions == "portable"
