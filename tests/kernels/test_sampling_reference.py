"""The definitions behind a step's tokens: what is drawn, adjusted, listed."""

import functools
import itertools
import math

import pytest
import torch

from kernels import sampling_reference as reference
from tests.fakes.expected_draws import check_draws, chi_square_limit, drawn_probabilities

INFINITY = float("inf")
DRAWS_COUNT = 20_000


def draw(logits, temperature=1.0, seeds=range(1), choice=0, index=0, top_k=0, top_p=1.0, min_p=0.0):
    """One draw for each seed, all from the same logits."""
    rows = len(seeds)
    ids, finite = reference.sample(
        torch.as_tensor(logits, dtype=torch.float32).expand(rows, -1),
        torch.full((rows,), temperature),
        torch.as_tensor(seeds, dtype=torch.int64),
        torch.full((rows,), choice),
        torch.as_tensor(index, dtype=torch.int64).expand(rows),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )
    assert finite.all()
    return ids


def survivors(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Ids that pass the filters."""
    kept = reference.filtered_logits(
        torch.tensor([logits]),
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    return kept[0].isfinite().nonzero()[:, 0].tolist()


# ---------------------------------------------------------------- distributions


FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 48},
    "top_p": {"top_p": 0.8},
    "top_p of one": {"top_p": 0.01},
    "top_p of zero": {"top_p": 0.0},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "top_k, top_p": {"top_k": 12, "top_p": 0.7},
    "top_k, min_p": {"top_k": 6, "min_p": 0.15},
    "top_p, min_p": {"top_p": 0.95, "min_p": 0.05},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.04},
}


@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_exact_distribution(name, temperature):
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(48, generator=generator) * 2
    logits[[3, 17, 30]] = float(logits[9])  # A tie of four.
    filters = FILTERS[name]
    drawn = draw(logits, temperature, [11] * DRAWS_COUNT, index=range(DRAWS_COUNT), **filters)
    check_draws(
        drawn.tolist(), drawn_probabilities(logits.tolist(), temperature=temperature, **filters)
    )


def test_the_check_of_a_distribution_finds_a_wrong_one():
    logits = [0.0, 0.5, 1.0, 1.5]
    drawn = draw(logits, 1.0, range(DRAWS_COUNT)).tolist()
    check_draws(drawn, drawn_probabilities(logits))
    with pytest.raises(AssertionError):
        check_draws(drawn, drawn_probabilities(logits, temperature=1.1))
    with pytest.raises(AssertionError, match="forbidden"):
        check_draws(drawn, drawn_probabilities(logits, top_k=3))


@pytest.mark.parametrize(
    ("degrees", "limit"), [(2, 18.421), (7, 29.878), (15, 44.263), (47, 92.006)]
)
def test_the_limit_is_that_of_the_tables(degrees, limit):
    assert chi_square_limit(degrees) == pytest.approx(limit, rel=0.05)


@pytest.mark.parametrize("varied", ["choice", "index"])
def test_draws_that_differ_in_one_key_are_independent(varied):
    """Pairs of draws with the same seed: all 16 combinations about equally often."""
    seeds = range(16_000)
    pairs = draw([0.0] * 4, 1.0, seeds) * 4 + draw([0.0] * 4, 1.0, seeds, **{varied: 1})
    check_draws(pairs.tolist(), [1 / 16] * 16)


def test_a_low_temperature_tends_to_the_argmax_and_a_high_one_to_equal_shares():
    logits = [1.0, 1.2, 0.0]
    assert (draw(logits, 0.001, range(500)) == 1).all()
    shares = torch.bincount(draw(logits, 1000.0, range(30_000)), minlength=3) / 30_000
    assert float((shares - 1 / 3).abs().max()) < 0.02


# ---------------------------------------------------------------- filters


def test_top_k_takes_the_lower_ids_of_a_tie():
    assert survivors([1.0, 2.0, 1.0, 1.0], top_k=3) == [0, 1, 2]
    assert survivors([1.0, 2.0, 1.0, 1.0], top_k=9) == [0, 1, 2, 3]
    assert survivors([1.0, 2.0, 1.0, 1.0], top_k=0) == [0, 1, 2, 3]


def test_top_p_takes_the_shortest_run_that_reaches_it():
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert survivors(logits, top_p=0.39) == [1]
    assert survivors(logits, top_p=0.41) == [1, 3]
    assert survivors(logits, top_p=0.71) == [1, 2, 3]
    assert survivors(logits, top_p=0.0) == [1]
    assert survivors([0.0] * 8, top_p=0.25) == [0, 1], "reached exactly: no further one"


def test_top_p_of_one_keeps_what_rounding_would_lose():
    assert survivors([0.0, -90.0], top_p=1.0) == [0, 1]


def test_top_p_counts_among_the_survivors_of_top_k():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # 0.4 of 0.7 is more than half; without top_k the second would be needed.
    assert survivors(logits, top_k=2, top_p=0.5) == [0]
    assert survivors(logits, top_p=0.5) == [0, 1]


def test_min_p_is_relative_to_the_likeliest_at_the_temperature():
    logits = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert survivors(logits, min_p=0.4) == [0, 1]
    assert survivors(logits, temperature=3.0, min_p=0.4) == [0, 1, 2]
    assert survivors([1.0, 1.0, 0.9], min_p=1.0) == [0, 1]


def test_a_forbidden_token_never_survives():
    assert survivors([-INFINITY, 0.0, -INFINITY, 1.0], top_k=4) == [1, 3]
    assert (draw([-INFINITY, 0.0, -INFINITY], 100.0, range(500)) == 1).all()


# ---------------------------------------------------------------- rows and noise


def test_a_draw_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(5)
    arguments = [
        torch.randn(20, 300, generator=generator),
        torch.linspace(0.0, 2.0, 20),
        *(torch.randint(0, 1000, (20,), generator=generator) for _ in range(3)),
        torch.arange(20) % 4 * 7,
        1 - torch.arange(20) % 3 * 0.2,
        torch.arange(20) % 5 * 0.01,
    ]
    ids, _ = reference.sample(*arguments)
    for row in range(20):
        alone, _ = reference.sample(*(part[row : row + 1] for part in arguments))
        assert alone[0] == ids[row]


@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
def test_a_row_without_a_softmax_is_told_and_spoils_no_other(bad):
    rows = torch.tensor([[0.0, 1.0], [0.0, bad], [-INFINITY, -INFINITY], [-INFINITY, 0.0]])
    keys = [torch.arange(4)] * 3
    off = [torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.zeros(4)]
    for temperature in (0.0, 1.0):
        ids, finite = reference.sample(rows, torch.full((4,), temperature), *keys, *off)
        assert finite.tolist() == [True, False, False, True]
        assert ids[1:].tolist() == [0, 0, 1]


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


# ---------------------------------------------------------------- adjustments, listings


def adjusted(logit, bias=0.0, count=0, presence=0.0, frequency=0.0, repetition=1.0):
    """The second of three logits adjusted; the others must not change."""
    logits = torch.tensor([[7.0, logit, 9.0]])
    number = functools.partial(torch.tensor, dtype=torch.float32)
    found = reference.adjust_logits(
        logits,
        torch.tensor([0]),
        torch.tensor([1]),
        number([bias]),
        torch.tensor([count]),
        number([presence]),
        number([frequency]),
        number([repetition]),
    )
    assert logits[0, 1] == logit or math.isnan(logit), "the caller's logits stay"
    assert found[0, [0, 2]].tolist() == [7.0, 9.0]
    return found[0, 1].item()


def test_adjustments_come_in_their_order():
    assert adjusted(3.0, bias=1.0) == 4.0
    assert adjusted(3.0, repetition=2.0) == 1.5
    assert adjusted(-3.0, repetition=2.0) == -6.0
    assert adjusted(-3.0, bias=5.0, repetition=2.0) == 1.0, "the bias first"
    assert adjusted(3.0, count=2, presence=0.5, frequency=0.25) == 2.0
    assert adjusted(3.0, presence=0.5, frequency=0.25) == 3.0, "not in the output"
    assert adjusted(4.0, 2.0, 3, 1.0, 0.5, 2.0) == 0.5


def test_no_adjustment_makes_a_row_infinite_or_hides_that_it_is():
    largest = torch.finfo(torch.float32).max
    assert adjusted(10.0, repetition=1e-45) == largest
    assert adjusted(-largest, repetition=100.0) == -largest
    assert adjusted(5.0, bias=-INFINITY, repetition=0.5) == -INFINITY
    assert adjusted(INFINITY, repetition=2.0) == INFINITY
    assert math.isnan(adjusted(float("nan"), bias=1.0))


def test_logprobs_are_of_the_logits_given_and_tops_descend():
    rows = torch.tensor([[0.0, math.log(3.0), 0.0, math.log(4.0)]] * 2)
    logprobs, top_logprobs, top_ids = reference.token_logprobs(rows, torch.tensor([1, 3]), 3)
    assert logprobs.exp().tolist() == pytest.approx([3 / 9, 4 / 9])
    assert top_ids.tolist() == [[3, 1, 0]] * 2
    assert top_logprobs.exp()[0].tolist() == pytest.approx([4 / 9, 3 / 9, 1 / 9])


def test_listings_of_forbidden_tokens_and_of_rows_without_a_softmax():
    rows = torch.tensor([[-INFINITY, 0.0, -INFINITY], [0.0, float("nan"), 1.0]])
    logprobs, top_logprobs, top_ids = reference.token_logprobs(rows, torch.tensor([0, 2]), 3)
    assert logprobs[0] == -INFINITY
    assert top_ids.tolist() == [[1, 0, 2], [0, 1, 2]]
    assert top_logprobs[0].tolist() == [0.0, -INFINITY, -INFINITY]
    assert list(itertools.chain(logprobs[1:], top_logprobs[1])) == pytest.approx(
        [float("nan")] * 4, nan_ok=True
    )
