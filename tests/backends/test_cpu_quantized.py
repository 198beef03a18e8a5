"""Products with weights of 8 and 4 bits, in every set of instructions that this machine has."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from backends.cpu.device import CpuDevice
from backends.cpu.host import CpuChip
from backends.cpu.kernel_library import Engine, PackedMatrix, load_library
from backends.cpu.native_kernels import NativeKernels
from backends.cpu.options import INSTRUCTIONS
from backends.cpu.plugin import CpuBackend
from backends.errors import BackendUnavailable
from backends.interface import WeightForm

GROUP = 32
THREADS = 2
SHAPES = [(1, 32), (33, 64), (96, 576), (200, 1536)]
QUANTIZED = [WeightForm.Q8_0, WeightForm.Q4_0, WeightForm.Q4_1]


def available():
    try:
        return INSTRUCTIONS[: load_library().polychip_best_instructions() + 1]
    except BackendUnavailable:
        return ()


pytestmark = pytest.mark.skipif(not available(), reason="the native kernels are not built")
every_form = pytest.mark.parametrize("form", QUANTIZED, ids=lambda form: form.value)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


@pytest.fixture(scope="module", params=available())
def engine(request):
    return Engine(THREADS, request.param)


def blocks_of(form, *shape):
    """Random blocks as GGUF has them, every bit pattern among the numbers, and what they are."""
    rows, columns = shape
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (rows, columns // GROUP, form.block_bytes), np.uint8)
    scales = generator.normal(size=blocks.shape[:2]).astype(np.float16)
    # Some below the normal numbers of float16, and zeros of both signs.
    scales[::5] *= np.float16(1e-6)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    if form is WeightForm.Q4_1:
        minima = generator.normal(size=scales.shape).astype(np.float16) * np.float16(4)
        blocks[..., 2:4] = minima[..., None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)
    kind = gguf.GGMLQuantizationType[form.value]
    return torch.from_numpy(blocks), torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def packed(engine, form, dtype, *shape):
    """A matrix of random blocks and the numbers it stands for."""
    blocks, numbers = blocks_of(form, *shape)
    matrix = PackedMatrix(engine, shape, dtype, form)
    matrix.write_blocks(0, blocks, form)
    return matrix, numbers


def in_groups(x):
    groups = -(-x.shape[1] // GROUP)
    return functional.pad(x, (0, groups * GROUP - x.shape[1])).view(len(x), groups, GROUP)


def quantized(x):
    """What is left of activations: 8 bits and a scale for each group of 32. [rows, K] double."""
    groups = in_groups(x.float())
    largest = groups.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    kept = (groups * inverse).round().double() * (largest / 127).double()
    return kept.flatten(1)[:, : x.shape[1]]


def without_ties(x):
    """Zeros where it would depend on the instructions which of two steps is the nearer one."""
    groups = in_groups(x.double())
    steps = groups * 127 / groups.abs().amax(dim=2, keepdim=True).clamp_min(1e-30)
    near = ((steps - steps.floor()) - 0.5).abs() < 1e-4
    return x.masked_fill(near.flatten(1)[:, : x.shape[1]], 0)


def product(engine, x, matrix, bias=None):
    return NativeKernels(engine, None).linear(x, matrix, bias, None)


def logits(engine, x, matrix):
    return NativeKernels(engine, None).logits(x, matrix)


@every_dtype
@every_form
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 33, 129])
def test_products_of_file_blocks_are_right(engine, form, dtype, shape, rows):
    torch.manual_seed(rows)
    matrix, weight = packed(engine, form, dtype, *shape)
    # Groups of very different sizes, one of zeros, and neighbours in memory that are NaN.
    wide = torch.full((rows, shape[1] + 3), float("nan"), dtype=dtype)
    x = wide[:, : shape[1]]
    sizes = 10.0 ** torch.randint(-3, 3, (rows, shape[1] // GROUP))
    x[:] = torch.randn(x.shape) * sizes.repeat_interleave(GROUP, dim=1)
    x[: rows // 2, :GROUP] = 0
    x[:] = without_ties(x)
    weight = weight.double()
    sizes = quantized(x).abs() @ weight.abs().T
    found = logits(engine, x, matrix)
    assert found.dtype == torch.float32
    # The integers are exact; what is rounded are scales, products with them, and their sums.
    exact = quantized(x) @ weight.T
    assert ((found.double() - exact).abs() <= 1e-5 * sizes).all()
    # Rounding moves a number of a group by at most half a step of it.
    steps = in_groups(x.double()).abs().amax(dim=2) / 127
    reach = steps @ in_groups(weight.abs()).sum(dim=2).T / 2
    error = (found.double() - x.double() @ weight.T).abs()
    assert (error <= reach * 1.001 + 1e-5 * sizes).all()
    bias = torch.randn(shape[0]).to(dtype)
    narrow = product(engine, x, matrix, bias)
    assert narrow.dtype == dtype
    expected = exact + bias.double()
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    assert ((narrow - expected).abs() <= rounding * expected.abs() + 1e-5 * sizes + 1e-6).all()


@every_form
def test_products_point_where_those_of_the_numbers_do(engine, form):
    torch.manual_seed(1)
    matrix, weight = packed(engine, form, torch.bfloat16, 300, 576)
    x = torch.randn(20, 576).bfloat16()
    found, expected = logits(engine, x, matrix).double(), x.double() @ weight.double().T
    assert functional.cosine_similarity(found, expected).min() > 0.9999
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.01


@pytest.mark.parametrize("form", [WeightForm.Q8_0, WeightForm.Q4_1], ids=["Q8_0", "Q4_1"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_do_not_overflow(engine, form, sign):
    """Every weight and every activation at its end, -128 among those of 8 bits."""
    blocks, _ = blocks_of(form, 32, 512)
    blocks = blocks.view(32, -1, form.block_bytes)
    blocks[..., :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    if form is WeightForm.Q4_1:
        blocks[..., 2:4] = 0
    blocks[..., -form.block_bytes + (2 if form is WeightForm.Q8_0 else 4) :] = (
        0x80 if form is WeightForm.Q8_0 else 0xFF
    )
    matrix = PackedMatrix(engine, (32, 512), torch.float32, form)
    matrix.write_blocks(0, blocks.view(32, -1), form)
    largest = -128 if form is WeightForm.Q8_0 else 15
    found = logits(engine, torch.full((5, 512), sign * 127.0), matrix)
    assert torch.equal(found, torch.full((5, 32), sign * 127.0 * largest * 512))


@every_dtype
@every_form
def test_a_row_does_not_depend_on_the_others(engine, form, dtype):
    torch.manual_seed(1)
    matrix, _ = packed(engine, form, dtype, 130, 608)
    x = torch.randn(129, 608).to(dtype)
    together = logits(engine, x, matrix)
    parts = ((0, 1), (3, 2), (7, 16), (40, 5), (50, 33), (100, 29))
    for first, count in parts:
        alone = logits(engine, x[first : first + count], matrix)
        assert torch.equal(alone, together[first : first + count])
    for threads in (1, 6):
        crowd = Engine(threads, engine.instructions)
        again, _ = packed(crowd, form, dtype, 130, 608)
        assert torch.equal(logits(crowd, x, again), together)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (40, 577), (130, 96)])
def test_numbers_are_rounded_to_8_bits(engine, dtype, shape):
    """Of a group no number moves by more than half a step; columns may end within one."""
    torch.manual_seed(1)
    weight = torch.randn(shape) * 10.0 ** torch.randint(-7, 3, (shape[0], 1))
    matrix = PackedMatrix(engine, shape, dtype, WeightForm.Q8_0)
    for first in range(0, shape[0], 7):
        matrix.write(first, weight[first : first + 7])
    kept = matrix.read(torch.arange(shape[0]))
    assert kept.dtype == dtype
    largest = in_groups(weight).abs().amax(dim=2, keepdim=True)
    # A scale is a float16, whose steps are 2^-24 where it is small.
    steps = (largest / 127 * (1 + 2.0**-10) + 2.0**-24).expand(in_groups(weight).shape)
    bound = steps.reshape(len(weight), -1)[:, : shape[1]] / 2
    rounding = 2.0**-8 * weight.abs() if dtype == torch.bfloat16 else 0.0
    assert ((kept.float() - weight).abs() <= bound * 1.001 + rounding).all()
    x = without_ties(torch.randn(9, shape[1]).to(dtype))
    exact = PackedMatrix(engine, shape, torch.float32, WeightForm.Q8_0)
    exact.write(0, weight)
    numbers = exact.read(torch.arange(shape[0])).double()
    found = logits(engine, x, matrix).double()
    sizes = quantized(x).abs() @ numbers.abs().T
    assert ((found - quantized(x) @ numbers.T).abs() <= 1e-5 * sizes).all()


@every_form
def test_rows_are_read_as_the_numbers_of_their_blocks(engine, form):
    matrix, weight = packed(engine, form, torch.float32, 70, 96)
    chosen = torch.randint(70, (20,))
    assert torch.equal(matrix.read(chosen), weight[chosen])
    narrow, weight = packed(engine, form, torch.bfloat16, 70, 96)
    assert torch.equal(narrow.read(chosen), weight[chosen].bfloat16())


@every_form
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_stay_in_their_rows(engine, form, special):
    matrix, _ = packed(engine, form, torch.float32, 40, 64)
    x = torch.randn(3, 64)
    x[1, 5] = special
    finite = torch.isfinite(logits(engine, x, matrix))
    assert finite[[0, 2]].all()
    assert not finite[1].any()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30])
def test_activations_of_any_size(engine, size):
    matrix, weight = packed(engine, WeightForm.Q8_0, torch.float32, 40, 64)
    x = torch.randn(2, 64).clamp(-1, 1) * size
    found, expected = logits(engine, x, matrix).double(), x.double() @ weight.double().T
    error = (found - expected).norm(dim=1)
    assert (error < 0.02 * expected.norm(dim=1) + 1e-33).all()


@every_form
def test_a_device_counts_what_blocks_take(form):
    backend = CpuBackend()
    engine = Engine(THREADS)
    chip = CpuChip(0, "cores", 1 << 30, "", tuple(sorted(backend._cores)))
    device = CpuDevice(chip, 64 << 20, engine)
    assert form in device.weight_forms
    matrix = device.allocate_matrix((64, 96), torch.bfloat16, form)
    assert matrix.nbytes == 64 * 3 * form.block_bytes
    assert device.memory_info().free_bytes == (64 << 20) - matrix.nbytes
    assert device.matrix_bytes((64, 96), torch.bfloat16, form) == matrix.nbytes
    blocks, weight = blocks_of(form, 64, 96)
    device.write_blocks(matrix, 0, blocks[:40], form)
    device.write_blocks(matrix, 40, blocks[40:], form)
    assert torch.equal(device.read_rows(matrix, range(64)), weight.bfloat16())
    assert CpuDevice(chip, None).weight_forms == {WeightForm.PLAIN}


@every_dtype
@every_form
@pytest.mark.parametrize("shape", SHAPES)
def test_a_plain_matrix_takes_the_numbers_that_blocks_stand_for(engine, form, dtype, shape):
    blocks, numbers = blocks_of(form, *shape)
    matrix = PackedMatrix(engine, shape, dtype)
    matrix.write(0, torch.full(shape, -1, dtype=dtype))
    # Parts that begin and end within a panel, the last one first.
    cut = shape[0] // 3
    matrix.write_blocks(cut, blocks[cut:], form)
    matrix.write_blocks(0, blocks[:cut], form)
    found = matrix.read(torch.arange(shape[0]))
    assert torch.equal(found, numbers.to(dtype))


@every_form
def test_scales_that_are_no_numbers_stay_what_they_are(engine, form):
    blocks, _ = blocks_of(form, 2, 32)
    scales = torch.tensor([torch.inf, torch.nan], dtype=torch.float16)
    blocks[:, :2] = scales[:, None].view(torch.uint8)
    matrix = PackedMatrix(engine, (2, 32), torch.bfloat16)
    matrix.write_blocks(0, blocks, form)
    kind = gguf.GGMLQuantizationType[form.value]
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind)).bfloat16()
    found = matrix.read(torch.arange(2))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
