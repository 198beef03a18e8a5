"""Every operation of a backend against the reference, by the same cases for every backend."""

import pytest
import torch
import torch.nn.functional as functional

from backends.errors import UnsupportedOperation
from backends.interface import KVSpec, Requirement
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from kernels.spec import OPERATIONS
from tests.backends.kernel_calls import PLACEMENTS, check_close

ROWS = (0, 1, 2, 7, 32, 129, 1024)
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.fixture(params=["dense", *PLACEMENTS])
def placement(request):
    """How the operand lies on the chip."""
    return None if request.param == "dense" else request.param


@pytest.fixture
def check(call, dtype):
    """Calls backend and reference with the same arguments and compares all they return."""

    def run(operation, *arguments, result_dtypes=(), placement=None):
        actual = call(operation, *arguments, dtype=dtype, placement=placement)
        expected = REFERENCE[operation](*arguments)
        parts = [actual, expected]
        if not isinstance(expected, tuple):
            parts = [(part,) for part in parts]
        for index, (found, wanted) in enumerate(zip(*parts, strict=True)):
            check_close(found, wanted, (*result_dtypes, dtype, dtype)[index])
        return actual

    return run


def random(generator, dtype, *shape):
    return torch.randn(shape, generator=generator).to(dtype)


def angles(generator, positions, half):
    each = torch.arange(positions)[:, None] * torch.rand(half, generator=generator)
    return torch.cat([each.cos(), each.sin()], dim=-1)


# ---------------------------------------------------------------- many rows, odd widths


@pytest.mark.covers("rms_norm", "add_rms_norm")
@pytest.mark.parametrize("width", [1, 64, 577])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norms(check, generator, dtype, rows, width):
    x, residual = (random(generator, dtype, rows, width) for _ in range(2))
    weight = random(generator, dtype, width)
    check("rms_norm", x, weight, 1e-5)
    for earlier in (residual, residual.float() * 1.001):
        check("add_rms_norm", x, earlier, weight, 1e-5, result_dtypes=(dtype, torch.float32))


@pytest.mark.covers("logits")
@pytest.mark.parametrize("rows", ROWS[:-1])
def test_logits_are_not_rounded(check, generator, dtype, rows):
    hidden, weight = random(generator, dtype, rows, 96), random(generator, dtype, 5000, 96)
    # The operands are exact in both dtypes' float32 form, so only the sum's order may differ.
    check("logits", hidden, weight, result_dtypes=(torch.float32,))


@pytest.mark.covers("linear")
@pytest.mark.parametrize(("width", "outputs"), [(96, 131), (33, 7), (128, 64), (1, 1)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(check, generator, dtype, rows, width, outputs, biased):
    weight = random(generator, dtype, outputs, width) / 10
    bias = random(generator, dtype, outputs) if biased else None
    check("linear", random(generator, dtype, rows, width), weight, bias, None)


@pytest.mark.covers("rotary")
@pytest.mark.parametrize(("heads", "head_size"), [(5, 64), (1, 2), (3, 20)])
@pytest.mark.parametrize("rows", ROWS)
def test_rotary(check, generator, dtype, rows, heads, head_size):
    x = random(generator, dtype, rows, heads, head_size)
    positions = torch.randint(0, 200, (rows,), generator=generator)
    check("rotary", x, positions, angles(generator, 200, head_size // 2))


@pytest.mark.covers("silu_mul")
@pytest.mark.parametrize("width", [1, 64, 97])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(check, generator, dtype, rows, width):
    check("silu_mul", random(generator, dtype, rows, 2 * width) * 3)


@pytest.mark.covers("gelu_mul")
@pytest.mark.parametrize("width", [1, 64, 97])
@pytest.mark.parametrize("rows", ROWS)
def test_gelu_mul(check, generator, dtype, rows, width):
    check("gelu_mul", random(generator, dtype, rows, 2 * width) * 3)


@pytest.mark.covers("gelu_mul")
def test_the_gate_of_gelu_is_the_tanh_formula_to_its_ends(call):
    gates = torch.tensor([[-3e4, -50.0, -6.0, -1.5, -0.6, -1e-4, 0.0, 1e-4, 0.6, 1.5, 50.0, 3e4]])
    actual = call("gelu_mul", torch.cat([gates, torch.ones_like(gates)], dim=-1))
    expected = functional.gelu(gates.double(), approximate="tanh").float()
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.covers("soft_cap")
@pytest.mark.parametrize("cap", [1.0, 30.0])
@pytest.mark.parametrize("rows", ROWS[:-1])
def test_soft_cap(call, generator, rows, cap):
    logits = random(generator, torch.float32, rows, 777) * 40
    actual = call("soft_cap", logits, cap)
    check_close(actual, REFERENCE["soft_cap"](logits, cap), torch.float32)
    assert (actual.abs() <= cap).all()


@pytest.mark.covers("embedding")
@pytest.mark.parametrize("first_row", [0, 40])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", [1.0, 33**0.5])
def test_embedding_gives_zeros_for_rows_of_other_chips(
    call, generator, dtype, rows, first_row, scale
):
    weight = random(generator, dtype, 50, 33)
    ids = torch.randint(-10, 100, (rows,), generator=generator)
    actual = call("embedding", ids, weight, first_row, scale, dtype=dtype)
    assert torch.equal(actual, REFERENCE["embedding"](ids, weight, first_row, scale))
    foreign = (ids < first_row) | (ids >= first_row + 50)
    assert not actual[foreign].any()


# ---------------------------------------------------------------- operands that are views


@pytest.mark.covers("rms_norm", "add_rms_norm")
@pytest.mark.parametrize("width", [64, 61])
def test_norms_of_views(check, generator, dtype, placement, width):
    x, residual = (random(generator, dtype, 7, width) for _ in range(2))
    weight = random(generator, dtype, width)
    check("rms_norm", x, weight, 1e-5, placement=placement)
    check(
        *("add_rms_norm", x, residual.float(), weight, 1e-5),
        result_dtypes=(dtype, torch.float32),
        placement=placement,
    )


@pytest.mark.covers("rms_norm")
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_norms_of_heads(check, generator, dtype, rows, heads):
    x, weight = random(generator, dtype, rows, heads, 24), random(generator, dtype, 24)
    check("rms_norm", x, weight, 1e-6)


@pytest.mark.covers("rms_norm")
def test_norms_of_heads_that_are_parts_of_a_product(check, generator, dtype, placement):
    x, weight = random(generator, dtype, 7, 3, 16), random(generator, dtype, 16)
    check("rms_norm", x, weight, 1e-6, placement=placement)
    check("rms_norm", x[0], weight, 1e-6, placement=placement)
    check("rms_norm", x[0, 0], weight, 1e-6)
    check("rms_norm", x[None], weight, 1e-6)


@pytest.mark.covers("linear", "logits")
def test_products_of_views(check, generator, dtype, placement):
    x, weight = random(generator, dtype, 7, 48), random(generator, dtype, 33, 48)
    check("linear", x, weight, None, None, placement=placement)
    check("logits", x, weight, result_dtypes=(torch.float32,), placement=placement)


@pytest.mark.covers("rotary", "silu_mul", "gelu_mul")
def test_rotation_and_gate_of_views(check, generator, dtype, placement):
    positions = torch.tensor([5, 0, 9, 9, 1, 3, 7])
    x = random(generator, dtype, 7, 3, 16)
    check("rotary", x, positions, angles(generator, 10, 8), placement=placement)
    for gate in ("silu_mul", "gelu_mul"):
        check(gate, random(generator, dtype, 7, 2 * 24), placement=placement)


@pytest.mark.covers("soft_cap")
def test_soft_cap_of_views(call, generator, placement):
    logits = random(generator, torch.float32, 7, 33) * 40
    actual = call("soft_cap", logits, 30.0, placement=placement)
    check_close(actual, REFERENCE["soft_cap"](logits, 30.0), torch.float32)


@pytest.mark.covers("embedding")
def test_embedding_by_a_view_of_ids(runtime, device, generator, dtype):
    """Sampled rows are picked out of a longer list."""
    weight, ids = random(generator, dtype, 50, 32), torch.arange(40)
    name = str(dtype).removeprefix("torch.")
    table = runtime.bind_kernels({"embedding": Requirement(name, rows=20, last_dimension=32)})
    for placed in (device.to_chip(weight), device.to_matrix(weight)):
        found = table.dispatch("embedding", device.to_chip(ids)[1::2], placed, 0, 1.0)
        assert torch.equal(device.to_host(found), weight[1:40:2])


# ---------------------------------------------------------------- what is declared


@pytest.mark.covers("linear", "rms_norm")
def test_a_row_is_alike_in_any_batch_where_that_is_declared(call, generator, dtype, backend):
    if not backend.capabilities.batch_invariant:
        pytest.skip("not applicable: it is not declared")
    x, weight = random(generator, dtype, 129, 96), random(generator, dtype, 64, 96)
    for operation, *others in (("linear", weight, None, None), ("rms_norm", weight[0], 1e-5)):
        together = call(operation, x, *others, dtype=dtype)
        for rows in (slice(0, 1), slice(5, 12), slice(97, 129)):
            alone = call(operation, x[rows].contiguous(), *others, dtype=dtype)
            assert torch.equal(alone, together[rows])


def test_every_operation_is_bound_and_says_by_what(runtime, backend):
    spec = KVSpec(1, 1, 16, 16, torch.float32)
    requirement = Requirement("float32", layout=runtime.kv_layout(spec).order)
    wanted = set(OPERATIONS) - backend.capabilities.unsupported
    table = runtime.bind_kernels(dict.fromkeys(wanted, requirement))
    assert set(table.choices) == wanted
    assert all(choice.implementation and choice.reason for choice in table.choices.values())


def test_an_unknown_operation_or_layout_is_refused_with_the_reasons(runtime):
    with pytest.raises(UnsupportedOperation, match="unknown operation 'convolve'"):
        runtime.bind_kernels({"convolve": Requirement("float32")})
    with pytest.raises(UnsupportedOperation, match="layout 'ring' is not one of "):
        runtime.bind_kernels({"attention": Requirement("float32", layout="ring")})
    with pytest.raises(UnsupportedOperation, match="'linear' is not bound"):
        runtime.bind_kernels({}).dispatch("linear", None)
