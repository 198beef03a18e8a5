"""Native draws, log-probabilities and embeddings, in every set of instructions of this machine."""

import math

import pytest
import torch

from backends.cpu.kernel_library import Engine, PackedMatrix, load_library
from backends.cpu.native_kernels import NativeKernels
from backends.cpu.native_sampling import NativeSampling
from backends.cpu.options import INSTRUCTIONS
from backends.errors import BackendUnavailable
from kernels.reference import REFERENCE_IMPLEMENTATIONS

REFERENCE = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}
THREADS = 2
INFINITY, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max
PART = 8192
"""Logits of an item: kPartLogits in kernels/cpu/logit_rows.h."""
# Beside whole vectors of 4, 8 and 16 numbers, and beside whole parts.
VOCABULARIES = (1, 5, 16, 17, 1009, PART - 1, PART, PART + 1, 20_011)
FILTERS = (
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
)


def available():
    try:
        found = INSTRUCTIONS[: load_library().polychip_best_instructions() + 1]
    except BackendUnavailable:
        return ()
    # Tiles are for products.
    return tuple(each for each in found if each != "amx")


pytestmark = pytest.mark.skipif(not available(), reason="the native kernels are not built")


@pytest.fixture(scope="module", params=available())
def engine(request):
    return Engine(THREADS, request.param)


@pytest.fixture
def native(engine):
    return NativeSampling(engine)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(11)


def arguments_of(generator, logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """A draw of each row, each with a key of its own; temperature: of all rows, or a tensor."""
    rows = len(logits)
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator) * 2
    return (
        logits,
        torch.as_tensor(temperature, dtype=torch.float32).expand(rows),
        seed,
        torch.randint(0, 3, (rows,), generator=generator),
        torch.randint(0, 5000, (rows,), generator=generator),
        torch.full((rows,), top_k),
        torch.full((rows,), float(top_p)),
        torch.full((rows,), float(min_p)),
    )


def check_draws(native, arguments):
    ids, finite = native.sample(*arguments)
    expected_ids, expected_finite = REFERENCE["sample"](*arguments)
    assert torch.equal(finite, expected_finite)
    assert torch.equal(ids, expected_ids)


def normal(generator, rows, vocabulary):
    return torch.randn(rows, vocabulary, generator=generator) * 3


# ---------------------------------------------------------------- sample


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_are_those_of_the_reference(native, generator, filters):
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.5, 1e-5, 0.7, 1.0, 100.0, 1.0, 3.0])
    for vocabulary in VOCABULARIES:
        logits = torch.cat(
            [
                normal(generator, 4, vocabulary),
                normal(generator, 4, vocabulary).round(),  # ties
                torch.zeros(2, vocabulary),
            ]
        )
        check_draws(native, arguments_of(generator, logits, temperature, **filters))


@pytest.mark.parametrize("level", [0.0, 0.5, 8.0])
def test_no_winner_is_overlooked(native, generator, level):
    """Winners are anywhere between the likeliest token and the tail, in every place of a vector."""
    logits = normal(generator, 1, 300).mul(level).expand(3000, -1)
    check_draws(native, arguments_of(generator, logits, 1.0))
    logits = normal(generator, 1, 2 * PART).mul(level).expand(40, -1)
    check_draws(native, arguments_of(generator, logits, 1.0))


@pytest.mark.parametrize("filters", [{}, {"top_k": 700}, {"top_p": 0.6}, {"min_p": 0.3}], ids=str)
@pytest.mark.parametrize("temperature", [1e-44, 1e-20, 1e-15, 1e-13, 1e-7, 1e20, 3e38])
def test_temperatures_at_the_ends_of_their_range(native, generator, temperature, filters):
    """Where noise drowns in a score's rounding, and where a difference leaves float32."""
    logits = torch.cat(
        [
            normal(generator, 3, 1001),
            normal(generator, 3, 1001).mul(1e4),
            normal(generator, 3, 1001).round(),
            normal(generator, 3, 1001).mul(1e-40),
            torch.full((3, 1001), 25.0),
            torch.where(normal(generator, 3, 1001) > 0, LARGEST, -LARGEST),
            normal(generator, 3, 1001).mul(1e37),
        ]
    )
    check_draws(native, arguments_of(generator, logits, temperature, **filters))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e20])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_forbidden_tokens_are_never_drawn(native, generator, filters, temperature):
    logits = normal(generator, 6, PART + 40)
    hidden = torch.rand(logits.shape, generator=generator) < 0.999
    hidden[0], hidden[1], hidden[2] = True, True, True
    hidden[0, 0] = hidden[1, PART] = hidden[2, -1] = False
    logits.masked_fill_(hidden, -INFINITY)
    arguments = arguments_of(generator, logits, temperature, **filters)
    check_draws(native, arguments)
    ids, _ = native.sample(*arguments)
    assert ids[:3].tolist() == [0, PART, PART + 39]


@pytest.mark.parametrize("bad", [NAN, math.copysign(NAN, -1.0), INFINITY, "nothing"])
@pytest.mark.parametrize("vocabulary", [1, 17, PART + 5])
def test_rows_without_a_softmax_are_told(native, generator, vocabulary, bad):
    """In a whole vector, in the last numbers, in the last part; the rows beside them are drawn."""
    logits = normal(generator, 8, vocabulary)
    for row, place in ((1, 0), (3, vocabulary // 2), (5, vocabulary - 1)):
        logits[row, place] = NAN if bad == "nothing" else bad
        if bad == "nothing":
            logits[row] = -INFINITY
    for filters in ({}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"top_p": 0.5}):
        temperature = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
        arguments = arguments_of(generator, logits, temperature, **filters)
        assert native.sample(*arguments)[1].tolist() == [row not in (1, 3, 5) for row in range(8)]
        check_draws(native, arguments)


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_large_vocabulary_cut_out_of_a_larger_one(native, generator, filters):
    """Nothing beyond a row's end is looked at, and nothing is copied to leave it out."""
    vocabulary = 260_003
    wide = torch.full((4, vocabulary + 61), NAN)
    wide[:, :vocabulary] = normal(generator, 4, vocabulary)
    temperature = torch.tensor([0.0, 0.4, 1.0, 2.0])
    check_draws(native, arguments_of(generator, wide[:, :vocabulary], temperature, **filters))


def neighbours(generator, rows, vocabulary):
    """Numbers between which there is no other."""
    order = torch.rand(rows, vocabulary, generator=generator).argsort(dim=-1)
    return 1.0 + order * 2.0**-23


def test_the_smallest_difference_counts(native, generator):
    for min_p in (0.9999970, 0.9999975, 0.9999980, 0.9999985):
        logits = neighbours(generator, 500, 64)
        check_draws(native, arguments_of(generator, logits, 1.0, min_p=min_p))
    logits = neighbours(generator, 100, 5000)
    for top_k in (3, 30):
        check_draws(native, arguments_of(generator, logits, 1.0, top_k=top_k))
    found = native.token_logprobs(logits, torch.zeros(100, dtype=torch.int64), 9)
    assert torch.equal(found[2], logits.sort(dim=-1, descending=True).indices[:, :9])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3e38])
def test_nothing_beyond_a_row_is_drawn(native, generator, temperature):
    """What lies beside a row in memory is as likely as can be."""
    wide = torch.full((200, 64), LARGEST)
    wide[:, 30:33] = normal(generator, 200, 3)
    check_draws(native, arguments_of(generator, wide[:, 30:33], temperature))


@pytest.mark.parametrize("threads", [1, 5])
def test_a_draw_depends_on_its_row_alone(engine, generator, threads):
    other = NativeSampling(Engine(threads, engine.instructions))
    logits = normal(generator, 12, 3 * PART + 7)
    temperature = torch.linspace(0.0, 2.0, 12)
    together = arguments_of(generator, logits, temperature, top_k=5000, top_p=0.95)
    ids, _ = NativeSampling(engine).sample(*together)
    for row in range(12):
        alone = [column[row : row + 1] for column in together]
        assert other.sample(*alone)[0].tolist() == [int(ids[row])]


def test_columns_may_lie_anywhere(native, generator):
    """The draw's arguments are parts of wider tensors."""
    arguments = arguments_of(generator, normal(generator, 6, 40), 1.0, top_k=5)
    apart = [torch.stack([column, column], dim=1)[:, 1] for column in arguments[1:]]
    transposed = arguments[0].T.contiguous().T
    assert torch.equal(native.sample(transposed, *apart)[0], native.sample(*arguments)[0])


def test_no_rows_are_no_draws(native, generator):
    ids, finite = native.sample(*arguments_of(generator, torch.zeros(0, 7), 1.0))
    assert ids.shape == finite.shape == (0,)


# ---------------------------------------------------------------- token_logprobs


@pytest.mark.parametrize("tops_count", [0, 1, 20])
@pytest.mark.parametrize("vocabulary", [20, 33, PART, 3 * PART + 5, 260_003])
def test_logprobs_are_those_of_the_reference(native, generator, vocabulary, tops_count):
    logits = torch.cat([normal(generator, 3, vocabulary), torch.zeros(5, vocabulary)])
    logits[3] = normal(generator, 1, vocabulary).round()[0]
    logits[4, : vocabulary // 2] = -INFINITY
    logits[5, 1:] = -INFINITY
    logits[6, -1] = NAN
    logits[7] = normal(generator, 1, vocabulary)[0] * 1e37
    ids = torch.randint(0, vocabulary, (8,), generator=generator)
    ids[:2] = torch.tensor([0, vocabulary - 1])
    found = native.token_logprobs(logits, ids, tops_count)
    expected = REFERENCE["token_logprobs"](logits, ids, tops_count)
    for actual, wanted in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("token", [-1, 50, 1 << 40])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(native, token):
    with pytest.raises(IndexError, match="vocabulary of 50"):
        native.token_logprobs(torch.zeros(2, 50), torch.tensor([0, token]), 1)


# ---------------------------------------------------------------- embedding


@pytest.mark.parametrize("scale", [1.0, 33**0.5])
@pytest.mark.parametrize("first_row", [0, 40])
@pytest.mark.parametrize("size", [(1, 1), (50, 33), (300, 576)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_embeddings_are_those_of_the_reference(engine, generator, dtype, size, first_row, scale):
    weight = torch.randn(size, generator=generator).to(dtype)
    weight[0, 0] = NAN
    packed = PackedMatrix(engine, size, dtype)
    packed.write(0, weight)
    ids = torch.randint(-10, 400, (203,), generator=generator)
    ids[:5] = torch.tensor([first_row, first_row + size[0], -(2**63), 2**63 - 1, -1])
    expected = REFERENCE["embedding"](ids, weight, first_row, scale)
    wide = torch.full((2 * size[0], size[1] + 3), NAN, dtype=dtype)
    wide[::2, : size[1]] = weight
    for held in (packed, weight, wide[::2, : size[1]], weight.T.contiguous().T):
        found = NativeKernels(engine, None).embedding(ids, held, first_row, scale)
        assert found.dtype == dtype
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
