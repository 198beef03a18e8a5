"""Adjusting, drawing and listing: every choice of a backend is the reference's, ties included."""

import itertools

import pytest
import torch

from backends.interface import Requirement
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from tests.fakes.expected_draws import check_draws, drawn_probabilities

REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}
INFINITY = float("inf")
SAMPLE = pytest.mark.covers("sample", dtype="float32")
ADJUST = pytest.mark.covers("adjust_logits", dtype="float32")
LOGPROBS = pytest.mark.covers("token_logprobs", dtype="float32")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


# ---------------------------------------------------------------- logits of many shapes


def _smooth(generator, rows, vocabulary):
    return torch.randn(rows, vocabulary, generator=generator) * 3


def _peaked(generator, rows, vocabulary):
    """As of a language model: most of the mass on few tokens."""
    return torch.randn(rows, vocabulary, generator=generator).abs().pow(3)


def _tied(generator, rows, vocabulary):
    return torch.randint(0, 4, (rows, vocabulary), generator=generator).float()


def _level(generator, rows, vocabulary):  # noqa: ARG001
    return torch.zeros(rows, vocabulary)


def _forbidden(generator, rows, vocabulary):
    """Most tokens at -inf, with ties among the rest."""
    logits = torch.randn(rows, vocabulary, generator=generator).mul(4).round()
    hidden = torch.rand(rows, vocabulary, generator=generator) < 0.9
    hidden[:, 0] = False
    return logits.masked_fill(hidden, -INFINITY)


def _extreme(generator, rows, vocabulary):
    logits = torch.randn(rows, vocabulary, generator=generator) * 1e4
    logits[:, 1] = torch.finfo(torch.float32).max
    logits[:, 2] = torch.finfo(torch.float32).min
    logits[:, 3] = 1e-40
    return logits


def _spoilt(generator, rows, vocabulary):
    """Good rows beside rows without a softmax."""
    logits = torch.randn(rows, vocabulary, generator=generator)
    logits[1::4, vocabulary // 2] = float("nan")
    logits[2::8, vocabulary - 1] = INFINITY
    logits[6::8] = -INFINITY
    return logits


SHAPES = (_smooth, _peaked, _tied, _level, _forbidden, _extreme, _spoilt)
TEMPERATURES = (0.0, 1e-5, 0.3, 1.0, 2.5, 100.0)
TOP_KS = (0, 1, 2, 7, 40, 900, 10**6)
TOP_PS = (1.0, 0.9, 0.5, 0.25, 0.999, 1e-6, 0.0)
MIN_PS = (0.0, 0.05, 0.5, 1.0, 1e-9)


def _pick(generator, values, rows):
    chosen = torch.randint(0, len(values), (rows,), generator=generator)
    return torch.tensor(values)[chosen]


def _keys(generator, rows):
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator) * 2
    choice = torch.randint(0, 3, (rows,), generator=generator)
    return seed, choice, torch.randint(0, 5000, (rows,), generator=generator)


def _off(rows):
    return torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows)


# ---------------------------------------------------------------- sample


@SAMPLE
@pytest.mark.parametrize("vocabulary", [5, 64, 1009, 3001])
@pytest.mark.parametrize("rows", [1, 7, 129])
@pytest.mark.parametrize("shape", SHAPES)
def test_sample_with_filters_of_all_kinds_mixed(call, generator, shape, rows, vocabulary):
    arguments = (
        shape(generator, rows, vocabulary),
        _pick(generator, TEMPERATURES, rows),
        *_keys(generator, rows),
        _pick(generator, TOP_KS, rows),
        _pick(generator, TOP_PS, rows),
        _pick(generator, MIN_PS, rows),
    )
    ids, finite = call("sample", *arguments)
    expected_ids, expected_finite = REFERENCE["sample"](*arguments)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(finite, expected_finite)


@SAMPLE
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_sample_when_the_mass_is_spread_over_thousands(call, generator, top_p):
    rows = 12
    off = _off(rows)
    arguments = (
        _smooth(generator, rows, 20_000) / 3,
        torch.linspace(0.5, 3.0, rows),
        *_keys(generator, rows),
        off[0],
        torch.full((rows,), top_p),
        off[2],
    )
    assert torch.equal(call("sample", *arguments)[0], REFERENCE["sample"](*arguments)[0])


@SAMPLE
def test_sample_of_a_part_of_a_wider_table(call, generator):
    """Logits cut to the tokenizer's vocabulary are a view whose rows lie apart."""
    logits = _smooth(generator, 9, 301)
    keys, filters = _keys(generator, 9), (_pick(generator, TOP_KS, 9), *_off(9)[1:])
    temperature = _pick(generator, TEMPERATURES, 9)
    found = call("sample", logits, temperature, *keys, *filters, placement="columns")
    assert torch.equal(found[0], REFERENCE["sample"](logits, temperature, *keys, *filters)[0])


@LOGPROBS
def test_token_logprobs_of_a_part_of_a_wider_table(call, generator):
    logits, ids = _smooth(generator, 9, 301), torch.arange(9) * 30
    found = call("token_logprobs", logits, ids, 5, placement="columns")
    expected = REFERENCE["token_logprobs"](logits, ids, 5)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2], expected[2])


@ADJUST
@pytest.mark.parametrize("placement", [None, "columns"])
def test_nothing_to_adjust_is_a_copy(call, generator, placement):
    logits = _smooth(generator, 3, 50)
    nothing = [torch.zeros(0, dtype=torch.int64)] * 2
    entries = (*nothing, torch.zeros(0), nothing[0], *[torch.zeros(0)] * 3)
    found = call("adjust_logits", logits, *entries, placement=placement)
    assert torch.equal(found, logits)


@SAMPLE
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_exact_distribution(call, generator, filters):
    count = 20_000
    logits = _smooth(generator, 1, 24)
    ids, _ = call(
        "sample",
        logits.repeat(count, 1),
        torch.full((count,), 1.5),
        torch.full((count,), 3),
        torch.zeros(count, dtype=torch.int64),
        torch.arange(count),
        torch.full((count,), filters.get("top_k", 0)),
        torch.full((count,), filters.get("top_p", 1.0)),
        torch.full((count,), filters.get("min_p", 0.0)),
    )
    check_draws(ids.tolist(), drawn_probabilities(logits[0].tolist(), 1.5, **filters))


@SAMPLE
@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
def test_a_row_that_is_not_finite_spoils_no_other(call, generator, bad):
    arguments = (
        _smooth(generator, 4, 97),
        torch.tensor([0.0, 1.0, 0.0, 1.0]),
        *_keys(generator, 4),
        *_off(4),
    )
    expected, _ = call("sample", *arguments)
    arguments[0][1, 13] = bad
    arguments[0][2, 96] = bad
    ids, finite = call("sample", *arguments)
    assert finite.tolist() == [True, False, False, True]
    assert ids[1:3].tolist() == [0, 0]
    assert ids[[0, 3]].tolist() == expected[[0, 3]].tolist()


@SAMPLE
def test_greedy_takes_the_lowest_id_on_a_tie(call):
    logits = torch.zeros(2, 70)
    logits[0, [31, 64]] = 5.0
    zeros = torch.zeros(2, dtype=torch.int64)
    ids, _ = call("sample", logits, torch.zeros(2), zeros, zeros, zeros, *_off(2))
    assert ids.tolist() == [31, 0]


# ---------------------------------------------------------------- adjust_logits, token_logprobs


@ADJUST
@pytest.mark.parametrize("shape", SHAPES)
def test_adjust_logits(call, generator, shape):
    rows, vocabulary, entries = 9, 211, 500
    logits = shape(generator, rows, vocabulary)
    pairs = torch.randperm(rows * vocabulary, generator=generator)[:entries]
    arguments = (
        logits,
        pairs // vocabulary,
        pairs % vocabulary,
        _pick(generator, (0.0, 0.0, -1.5, 100.0, -100.0, -INFINITY), entries),
        _pick(generator, (0, 0, 1, 2, 70), entries),
        _pick(generator, (0.0, 0.5, -2.0), entries),
        _pick(generator, (0.0, 0.1, 2.0, -1.0), entries),
        _pick(generator, (1.0, 1.3, 0.5, 100.0, 1e-40), entries),
    )
    found = call("adjust_logits", *arguments)
    torch.testing.assert_close(
        found, REFERENCE["adjust_logits"](*arguments), rtol=1e-6, atol=0, equal_nan=True
    )


@ADJUST
def test_adjusted_logits_are_a_copy(runtime, device, generator):
    logits = _smooth(generator, 2, 30)
    on_chip = device.to_chip(logits)
    entries = [torch.tensor([0, 1]), torch.tensor([3, 29]), torch.tensor([1.0, -INFINITY])]
    entries += [torch.tensor([1, 2]), *[torch.tensor([0.5, 2.0])] * 3]
    requirement = Requirement("float32", rows=2, last_dimension=30)
    table = runtime.bind_kernels({"adjust_logits": requirement})
    found = table.dispatch("adjust_logits", on_chip, *map(device.to_chip, entries))
    assert torch.equal(device.to_host(on_chip), logits)
    assert not torch.equal(device.to_host(found), logits)


@LOGPROBS
@pytest.mark.parametrize(
    ("rows", "vocabulary", "tops_count"),
    [(*sizes, tops) for sizes in ((1, 20), (7, 64), (40, 3001)) for tops in (0, 1, 5, 20)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_token_logprobs(call, generator, shape, rows, vocabulary, tops_count):
    logits = shape(generator, rows, vocabulary)
    ids = torch.randint(0, vocabulary, (rows,), generator=generator)
    found = call("token_logprobs", logits, ids, tops_count)
    expected = REFERENCE["token_logprobs"](logits, ids, tops_count)
    for actual, wanted in itertools.islice(zip(found, expected, strict=True), 2):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(found[2], expected[2])
