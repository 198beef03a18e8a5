"""The definitions of a model's operations, against arithmetic done another way."""

import math

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


def test_attention_equals_torch_on_a_contiguous_context():
    torch.manual_seed(1)
    tokens, heads, size = 11, 3, 8
    query, key, value = (torch.randn(tokens, heads, size) for _ in range(3))
    arena = torch.zeros(3, 1, 2, 4, heads, size)
    cache = PagedKV(
        keys=(arena[:, 0, 0],),
        values=(arena[:, 0, 1],),
        block_tables=torch.tensor([[2, 0, 1]]),
        token_blocks=torch.tensor([2, 0, 1]).repeat_interleave(4)[:tokens],
        token_places=torch.arange(tokens) % 4,
        query_starts=(0, tokens),
        context_starts=(0,),
    )
    reference.write_kv(cache, 0, key, value)
    expected = functional.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in (query, key, value)), is_causal=True, scale=0.5
    )
    actual = reference.attention(cache, 0, query, (0, 1, 2), 0.5)
    torch.testing.assert_close(actual, expected[0].transpose(0, 1))
