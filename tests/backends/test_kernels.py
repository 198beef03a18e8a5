"""Every operation of a backend against the reference, by the same cases for every backend."""

import pytest
import torch

from backends.errors import UnsupportedOperation
from backends.interface import KVSpec, Requirement
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from kernels.spec import OPERATIONS
from tests.backends.kernel_calls import PLACEMENTS
from tests.backends.mirrored_pool import MirroredPool, shuffled_rows

ROWS = (0, 1, 2, 7, 32, 129, 1024)
# Twice the rounding of one operand, over sums of some hundred terms.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.fixture(params=["dense", *PLACEMENTS])
def placement(request):
    """How the operand lies on the chip."""
    return None if request.param == "dense" else request.param


def check_close(actual, expected, dtype):
    assert actual.dtype == expected.dtype
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


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


@pytest.mark.covers("embedding")
@pytest.mark.parametrize("first_row", [0, 40])
@pytest.mark.parametrize("rows", ROWS)
def test_embedding_gives_zeros_for_rows_of_other_chips(call, generator, dtype, rows, first_row):
    weight = random(generator, dtype, 50, 33)
    ids = torch.randint(0, 100, (rows,), generator=generator)
    actual = call("embedding", ids, weight, first_row, dtype=dtype)
    assert torch.equal(actual, REFERENCE["embedding"](ids, weight, first_row))
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


@pytest.mark.covers("linear", "logits")
def test_products_of_views(check, generator, dtype, placement):
    x, weight = random(generator, dtype, 7, 48), random(generator, dtype, 33, 48)
    check("linear", x, weight, None, None, placement=placement)
    check("logits", x, weight, result_dtypes=(torch.float32,), placement=placement)


@pytest.mark.covers("rotary", "silu_mul")
def test_rotation_and_gate_of_views(check, generator, dtype, placement):
    positions = torch.tensor([5, 0, 9, 9, 1, 3, 7])
    x = random(generator, dtype, 7, 3, 16)
    check("rotary", x, positions, angles(generator, 10, 8), placement=placement)
    check("silu_mul", random(generator, dtype, 7, 2 * 24), placement=placement)


@pytest.mark.covers("embedding")
def test_embedding_by_a_view_of_ids(runtime, device, generator, dtype):
    """Sampled rows are picked out of a longer list."""
    weight, ids = random(generator, dtype, 50, 32), torch.arange(40)
    name = str(dtype).removeprefix("torch.")
    table = runtime.bind_kernels({"embedding": Requirement(name, rows=20, last_dimension=32)})
    found = table.dispatch("embedding", device.to_chip(ids)[1::2], device.to_chip(weight), 0)
    assert torch.equal(device.to_host(found), weight[1:40:2])


# ---------------------------------------------------------------- attention over blocks


# (tokens in context, tokens of the step) for each row.
BATCHES = {
    "one decode": [(37, 1)],
    "first token": [(0, 1)],
    "whole prompt": [(0, 23)],
    "prefix and chunk": [(48, 17)],
    "decode, unlike lengths": [(0, 1), (15, 1), (16, 1), (130, 1), (300, 1)],
    "32 decode": [(row * 5 + 3, 1) for row in range(32)],
    "mixed": [(3, 1), (0, 40), (64, 16), (200, 1), (17, 2), (0, 3), (31, 3)],
    "129 rows": [(row % 50, 1) for row in range(129)],
    "1024 rows": [(row % 21, 1) for row in range(1024)],
    "many blocks": [(2050, 1), (1, 1), (1999, 40)],
}
HEAD_MAPS = {
    "even": (0, 0, 0, 1, 1, 1, 2, 2, 2),
    "one each": (0, 1, 2),
    "uneven, low rank": (0, 0, 0, 1, 1),
    "uneven, 4 and 1": (0, 0, 0, 0, 1),
    "uneven, high rank": (0, 1, 1, 1),
    "a key head unused": (0, 0, 2),
    "not sorted": (1, 0, 1, 0, 0),
}


@pytest.fixture
def attend(runtime, device, call, generator, dtype, backend):
    """Writes and reads a batch in every layer and compares with the reference."""
    opened = []

    def run(batch, q_to_kv, head_size=16, block_tokens=16, placement=None):
        if len(batch) > backend.capabilities.rows_max:
            pytest.skip(f"unsupported: more than {backend.capabilities.rows_max} rows in a step")
        spec = KVSpec(2, max(q_to_kv) + 1, head_size, block_tokens, dtype)
        rows, blocks = shuffled_rows(batch, block_tokens, generator)
        pool = MirroredPool(runtime, device, spec, blocks, call)
        opened.append(pool)
        pool.poison()
        pool.fill_context(rows, generator)
        tokens = rows.query_starts[-1]
        for layer in range(spec.layers):
            key, value = pool.keys_and_values(tokens, generator)
            pool.write(rows, layer, key, value, placement)
            query = random(generator, dtype, tokens, len(q_to_kv), head_size)
            actual, expected = pool.attend(rows, layer, query, q_to_kv, 0.25, placement)
            check_close(actual, expected, dtype)
            assert actual.isfinite().all()

    yield run
    for pool in opened:
        pool.close()


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("heads", ["even", "uneven, low rank"])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_over_written_keys(attend, batch, heads):
    attend(BATCHES[batch], HEAD_MAPS[heads])


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("heads", HEAD_MAPS)
@pytest.mark.parametrize("batch", ["mixed", "decode, unlike lengths"])
def test_attention_with_any_map_of_heads(attend, batch, heads):
    attend(BATCHES[batch], HEAD_MAPS[heads])


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("head_size", [2, 20, 64, 128])
def test_attention_with_any_head_size(attend, head_size):
    attend(BATCHES["mixed"], HEAD_MAPS["uneven, 4 and 1"], head_size=head_size)


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("times", [1, 3, 8])
def test_attention_with_any_block_the_backend_allows(attend, backend, times):
    block_tokens = backend.capabilities.block_tokens_multiple * times
    attend(BATCHES["mixed"], HEAD_MAPS["one each"], block_tokens=block_tokens)


@pytest.mark.covers("attention", "write_kv")
def test_attention_of_views(attend, placement):
    attend(BATCHES["mixed"], HEAD_MAPS["even"], placement=placement)


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
