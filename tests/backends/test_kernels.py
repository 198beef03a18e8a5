"""Every operation of a backend against the reference, by the same cases for every backend."""

import itertools

import pytest
import torch

from backends.errors import UnsupportedOperation
from backends.interface import BatchRows, KVSpec, Requirement
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from kernels.spec import OPERATIONS

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 7, 32, 129)
# Twice the rounding of one operand, over sums of some hundred terms.
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)}
REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request, backend):
    name = str(request.param).removeprefix("torch.")
    if name not in backend.capabilities.dtypes:
        pytest.skip(f"the backend does not compute in {name}")
    return request.param


@pytest.fixture
def call(runtime, device, dtype):
    """Calls the backend's choice for an operation with host tensors; the result is on the host."""

    def run(operation, *arguments):
        name = str(dtype).removeprefix("torch.")
        requirement = Requirement(dtype=name, layout="paged", rows=1 << 10)
        function = runtime.bind_kernels({operation: requirement}).function(operation)
        placed = [device.to_chip(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        return _to_host(device, function(*placed))

    return run


def _to_host(device, result):
    if isinstance(result, tuple):
        return tuple(_to_host(device, part) for part in result)
    return result if result is None else device.to_host(result)


def check_close(actual, expected, dtype):
    assert actual.dtype == expected.dtype
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norms(call, generator, dtype, rows):
    x, residual = (torch.randn(rows, 577, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(577, generator=generator).to(dtype)
    check_close(call("rms_norm", x, weight, 1e-5), REFERENCE["rms_norm"](x, weight, 1e-5), dtype)
    for earlier in (residual, residual.float() * 1.001):
        normed, total = call("add_rms_norm", x, earlier, weight, 1e-5)
        expected_normed, expected_total = REFERENCE["add_rms_norm"](x, earlier, weight, 1e-5)
        check_close(normed, expected_normed, dtype)
        check_close(total, expected_total, torch.float32)


@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_not_rounded(call, generator, dtype, rows):
    hidden = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = torch.randn(5000, 96, generator=generator).to(dtype)
    # The operands are exact in both dtypes' float32 form, so only the sum's order may differ.
    check_close(call("logits", hidden, weight), REFERENCE["logits"](hidden, weight), torch.float32)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(call, generator, dtype, rows, biased):
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = torch.randn(131, 96, generator=generator).to(dtype) / 10
    bias = torch.randn(131, generator=generator).to(dtype) if biased else None
    check_close(
        call("linear", x, weight, bias, None), REFERENCE["linear"](x, weight, bias, None), dtype
    )


@pytest.mark.parametrize("rows", ROWS)
def test_rotary(call, generator, dtype, rows):
    x = torch.randn(rows, 5, 64, generator=generator).to(dtype)
    positions = torch.randint(0, 200, (rows,), generator=generator)
    angles = torch.arange(200)[:, None] * torch.rand(32, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    check_close(
        call("rotary", x, positions, cos_sin), REFERENCE["rotary"](x, positions, cos_sin), dtype
    )


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(call, generator, dtype, rows):
    gate_up = torch.randn(rows, 2 * 97, generator=generator).to(dtype) * 3
    check_close(call("silu_mul", gate_up), REFERENCE["silu_mul"](gate_up), dtype)


@pytest.mark.parametrize("first_row", [0, 40])
@pytest.mark.parametrize("rows", ROWS)
def test_embedding_gives_zeros_for_rows_of_other_chips(call, generator, dtype, rows, first_row):
    weight = torch.randn(50, 33, generator=generator).to(dtype)
    ids = torch.randint(0, 100, (rows,), generator=generator)
    actual = call("embedding", ids, weight, first_row)
    assert torch.equal(actual, REFERENCE["embedding"](ids, weight, first_row))
    foreign = (ids < first_row) | (ids >= first_row + 50)
    assert not actual[foreign].any()


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
}
HEAD_MAPS = {
    "even": (0, 0, 0, 1, 1, 1, 2, 2, 2),
    "one each": (0, 1, 2),
    "uneven, low rank": (0, 0, 0, 1, 1),
    "uneven, high rank": (0, 1, 1, 1),
    "a key head unused": (0, 0, 2),
    "not sorted": (1, 0, 1, 0, 0),
}


@pytest.mark.parametrize("heads", HEAD_MAPS)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_over_written_keys(runtime, device, call, generator, dtype, batch, heads):
    q_to_kv = HEAD_MAPS[heads]
    spec = KVSpec(2, max(q_to_kv) + 1, 16, 16, dtype)
    rows, blocks_count = _rows(BATCHES[batch], spec.block_tokens, generator)
    pool = runtime.create_memory_pool(device, spec, blocks_count)
    _poison(pool, blocks_count)
    tokens = rows.query_starts[-1]
    shape = (tokens, spec.kv_heads, spec.head_size)
    _fill_context(pool, rows, call, generator, spec)
    for layer in range(spec.layers):
        cache = pool.bind(rows)
        key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        call("write_kv", cache, layer, key, value)
        query = torch.randn(tokens, len(q_to_kv), spec.head_size, generator=generator).to(dtype)
        actual = call("attention", cache, layer, query, q_to_kv, 0.25)
        expected = REFERENCE["attention"](pool.bind(rows), layer, query, q_to_kv, 0.25)
        check_close(actual, expected, dtype)
        assert actual.isfinite().all()


def _rows(batch, block_tokens, generator):
    """Block tables in shuffled order, the blocks of a row far apart."""
    query_starts = (0, *itertools.accumulate(count for _, count in batch))
    needs = [-(-(context + count) // block_tokens) for context, count in batch]
    shuffled = torch.randperm(sum(needs) + 3, generator=generator).tolist()
    ends = list(itertools.accumulate(needs))
    tables = tuple(tuple(shuffled[end - need : end]) for need, end in zip(needs, ends, strict=True))
    rows = BatchRows(query_starts, tuple(context for context, _ in batch), tables)
    return rows, len(shuffled)


def _poison(pool, blocks_count):
    """What nobody wrote is not a number, as memory of a fresh arena may be."""
    for layer in range(pool.spec.layers):
        tokens = blocks_count * pool.spec.block_tokens
        rows = BatchRows((0, tokens), (0,), (range(blocks_count),))
        shape = (tokens, pool.spec.kv_heads, pool.spec.head_size)
        nothing = torch.full(shape, float("nan"), dtype=pool.spec.dtype)
        REFERENCE["write_kv"](pool.bind(rows), layer, nothing, nothing)


def _fill_context(pool, rows, call, generator, spec):
    starts = (0, *itertools.accumulate(rows.context_starts))
    shape = (starts[-1], spec.kv_heads, spec.head_size)
    before = BatchRows(starts, (0,) * len(rows.context_starts), rows.block_tables)
    for layer in range(spec.layers):
        key, value = (torch.randn(shape, generator=generator).to(spec.dtype) for _ in range(2))
        call("write_kv", pool.bind(before), layer, key, value)


def test_every_operation_is_bound_and_says_by_what(runtime):
    requirements = {name: Requirement("float32", layout="paged") for name in OPERATIONS}
    table = runtime.bind_kernels(requirements)
    assert set(table.choices) == set(OPERATIONS)
    assert all(choice.implementation and choice.reason for choice in table.choices.values())


def test_an_unknown_operation_or_layout_is_refused_with_the_reasons(runtime):
    with pytest.raises(UnsupportedOperation, match="unknown operation 'convolve'"):
        runtime.bind_kernels({"convolve": Requirement("float32")})
    with pytest.raises(UnsupportedOperation, match="layout 'ring' is not one of paged"):
        runtime.bind_kernels({"attention": Requirement("float32", layout="ring")})
    with pytest.raises(UnsupportedOperation, match="'linear' is not bound"):
        runtime.bind_kernels({}).dispatch("linear", None)
