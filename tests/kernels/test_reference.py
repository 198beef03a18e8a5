"""The definitions themselves, against arithmetic done another way, and the sampler's statistics."""

import functools
import math

import pytest
import torch
import torch.nn.functional as functional

from kernels import reference
from kernels.paged_kv import PagedKV
from kernels.spec import OPERATIONS


def draw(logits, temperature, seeds, choice=0, index=0):
    rows = len(seeds)
    return reference.sample(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.as_tensor(seeds, dtype=torch.int64),
        torch.full((rows,), choice),
        torch.full((rows,), index),
    )[0]


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
    arena = torch.zeros(2, 1, 3, 4, heads, size)
    cache = PagedKV(
        keys=arena[0],
        values=arena[1],
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


# Chosen once: the 99.9 % points of chi-square with 7 degrees of freedom.
CHI_SQUARE_LIMIT = 24.32


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.5, 0.3, 0.3, -0.5, 1.0])
    draws_count = 40_000
    ids = draw(logits, temperature, range(draws_count))
    expected = torch.softmax(logits.double() / temperature, dim=-1) * draws_count
    observed = torch.bincount(ids, minlength=8).double()
    assert float(((observed - expected) ** 2 / expected).sum()) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("varied", ["choice", "index"])
def test_draws_that_differ_in_one_key_are_independent(varied):
    """Pairs of draws with the same seed: all 16 combinations about equally often."""
    logits = torch.zeros(4)
    seeds = range(16_000)
    pairs = draw(logits, 1.0, seeds) * 4 + draw(logits, 1.0, seeds, **{varied: 1})
    observed = torch.bincount(pairs, minlength=16).double()
    # The 99.9 % point of chi-square with 15 degrees of freedom.
    assert float(((observed - 1000) ** 2 / 1000).sum()) < 37.70


def test_a_low_temperature_tends_to_the_argmax_and_a_high_one_to_equal_shares():
    logits = torch.tensor([1.0, 1.2, 0.0])
    assert (draw(logits, 0.001, range(500)) == 1).all()
    shares = torch.bincount(draw(logits, 1000.0, range(30_000)), minlength=3) / 30_000
    assert float((shares - 1 / 3).abs().max()) < 0.02


def test_a_draw_does_not_depend_on_its_neighbours():
    torch.manual_seed(5)
    logits = torch.randn(20, 300)
    temperature = torch.linspace(0.0, 2.0, 20)
    keys = [torch.randint(0, 1000, (20,)) for _ in range(3)]
    ids, logprobs, _ = reference.sample(logits, temperature, *keys)
    for row in range(20):
        only = slice(row, row + 1)
        alone = reference.sample(logits[only], temperature[only], *(key[only] for key in keys))
        assert alone[0].item() == ids[row]
        torch.testing.assert_close(alone[1][0], logprobs[row])


def test_noise_belongs_to_the_token_id_not_to_the_vocabulary():
    """Tokens that cannot be drawn may be absent: the others keep their noise, and the draw."""
    seed, zero = torch.tensor([77]), torch.tensor([0])
    wide = reference.gumbel_noise(seed, zero, zero, 5000)
    assert torch.equal(wide[:, :100], reference.gumbel_noise(seed, zero, zero, 100))
    assert wide.unique().numel() == 5000
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2))
    padded = torch.cat([logits, torch.full((50,), -1e30)])
    assert torch.equal(draw(logits, 1.0, range(200)), draw(padded, 1.0, range(200)))


def test_noise_is_finite_for_the_extreme_hashes(monkeypatch):
    key = torch.zeros(1, dtype=torch.int64)
    for bits in (0, -1):
        constant = functools.partial(torch.full_like, fill_value=bits)
        monkeypatch.setattr(reference, "_mix", constant)
        assert reference.gumbel_noise(key, key, key, 2).isfinite().all()


def test_the_hash_is_splitmix64():
    """First outputs of splitmix64 for seed 0, from the author's program."""
    state = torch.tensor([0x9E3779B97F4A7C15 - 2**64])
    assert reference._mix(state).item() % 2**64 == 0xE220A8397B1DCDAF


def test_logprobs_are_of_the_raw_logits():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    zero = torch.tensor([0])
    for temperature in (0.0, 0.01):
        ids, logprobs, _ = reference.sample(logits, torch.tensor([temperature]), zero, zero, zero)
        assert ids.item() == 1
        assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
