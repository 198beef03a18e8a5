"""The definitions of a model's operations, against arithmetic done another way."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from kernels import reference
from kernels.paged_kv import PagedKV
from kernels.spec import OPERATIONS


def test_every_operation_has_a_definition():
    assert {found.operation for found in reference.REFERENCE_IMPLEMENTATIONS} == set(OPERATIONS)


def test_rms_norm_of_a_known_row():
    x = torch.tensor([[3.0, 4.0]])
    expected = torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5 + 0.5)
    weight = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(reference.rms_norm(x, weight, 0.5), expected)


def test_rotary_turns_halves_by_the_angle_of_the_position():
    angle = 0.3
    cos_sin = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])
    x = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
    rotated = reference.rotary(x, torch.tensor([0, 1]), cos_sin)
    turned = complex(1, 2) * complex(math.cos(angle), math.sin(angle))
    torch.testing.assert_close(rotated[0, 0], torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(rotated[1, 0], torch.tensor([turned.real, turned.imag]))


def test_a_scaled_embedding_is_rounded_once():
    weight = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    rows = reference.embedding(torch.tensor([0, 1]), weight, 0, 1.005)
    # bfloat16 has 1.0, 1.0078125 and steps of 1/64 near 3; the scale itself would become 1.0078125.
    assert rows.tolist() == [[1.0078125, 3.015625], [0.0, 0.0]]
    assert rows.dtype == torch.bfloat16


def test_rms_norm_is_of_the_last_dimension():
    x, weight = torch.randn(2, 3, 4), torch.randn(4)
    rows = torch.stack([reference.rms_norm(each, weight, 0.1) for each in x])
    assert torch.equal(reference.rms_norm(x, weight, 0.1), rows)


def test_gelu_is_the_tanh_formula():
    gate, up = torch.tensor([-2.0, 0.5]), torch.tensor([3.0, -1.0])
    inner = [math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) for x in gate.tolist()]
    expected = torch.tensor([0.5 * (1 + math.tanh(each)) for each in inner]) * gate * up
    torch.testing.assert_close(reference.gelu_mul(torch.cat([gate, up])[None])[0], expected)


def test_a_soft_cap_bends_and_bounds():
    capped = reference.soft_cap(torch.tensor([[0.0, 3.0, -300.0]]), 30.0)
    torch.testing.assert_close(capped, torch.tensor([[0.0, 30 * math.tanh(0.1), -30.0]]))


TOKENS, HEADS, SIZE = 11, 3, 8


def step_of(query_starts, context_starts, table_starts, tables):
    """A cache of three blocks of four tokens, all NaN, and the rows of a step."""
    arena = torch.full((3, 1, 2, 4, HEADS, SIZE), float("nan"))
    return PagedKV(
        keys=(arena[:, 0, 0],),
        values=(arena[:, 0, 1],),
        block_tables=torch.tensor(tables),
        token_blocks=torch.tensor([2, 0, 1]).repeat_interleave(4)[:TOKENS],
        token_places=torch.arange(TOKENS) % 4,
        query_starts=query_starts,
        context_starts=context_starts,
        table_starts=table_starts,
    )


def test_attention_equals_torch_on_a_contiguous_context():
    torch.manual_seed(1)
    query, key, value = (torch.randn(TOKENS, HEADS, SIZE) for _ in range(3))
    cache = step_of((0, TOKENS), (0,), (0,), [[2, 0, 1]])
    reference.write_kv(cache, 0, key, value)
    expected = functional.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in (query, key, value)), is_causal=True, scale=0.5
    )
    actual = reference.attention(cache, 0, query, (0, 1, 2), 0.5, 0, 0.0)
    torch.testing.assert_close(actual, expected[0].transpose(0, 1))


def test_attention_within_a_window_never_reads_what_is_behind_it():
    """The last query at position 10 with a window of 3: tokens 8, 9, 10; block 2 is given back."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(TOKENS, HEADS, SIZE) for _ in range(3))
    whole = step_of((0, TOKENS), (0,), (0,), [[2, 0, 1]])
    reference.write_kv(whole, 0, key, value)
    for first_held, table in ((8, [1]), (4, [0, 1])):
        for arena in (whole.keys[0], whole.values[0]):
            arena[2 if first_held == 4 else [0, 2]] = float("nan")
        last = replace(
            whole,
            block_tables=torch.tensor([table]),
            query_starts=(0, 1),
            context_starts=(10,),
            table_starts=(first_held,),
        )
        actual = reference.attention(last, 0, query[10:], (0, 1, 2), 0.5, 3, 0.0)
        scores = torch.einsum("hd,lhd->hl", query[10], key[8:]) * 0.5
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), value[8:])
        torch.testing.assert_close(actual[0], expected)
    with pytest.raises(AssertionError, match="position 3 of row 0 is not held"):
        reference.attention(last, 0, query[10:], (0, 1, 2), 0.5, 8, 0.0)


def test_a_soft_cap_bounds_the_scaled_scores():
    torch.manual_seed(1)
    query, key, value = (torch.randn(TOKENS, HEADS, SIZE) for _ in range(3))
    cache = step_of((0, TOKENS), (0,), (0,), [[2, 0, 1]])
    reference.write_kv(cache, 0, key, value)
    actual = reference.attention(cache, 0, query, (0, 1, 2), 0.5, 0, 0.4)
    scores = (torch.einsum("hd,lhd->hl", query[10], key) * 0.5 / 0.4).tanh() * 0.4
    expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), value)
    torch.testing.assert_close(actual[10], expected)
