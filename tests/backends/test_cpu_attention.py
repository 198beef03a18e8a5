"""Native attention on CPU cores: a query's result is its own, to the bit, and near as torch's."""

import dataclasses
import itertools
import random

import pytest
import torch

from backends.cpu.attention import PagedAttention
from backends.cpu.kernel_library import Engine, load_library
from backends.cpu.native_kernels import NativeKernels
from backends.cpu.options import INSTRUCTIONS
from backends.errors import BackendUnavailable
from backends.scratch import ScratchArena
from kernels.paged_kv import PagedKV

LAYOUTS = {"9/3": (9, 3), "16/8": (16, 8), "4/1": (4, 1), "8/8": (8, 8)}
FEATURES = {
    "plain": (0, 0.0),
    "window": (70, 0.0),
    "window over tiles": (300, 0.0),
    "soft cap": (0, 2.5),
    "both": (33, 2.5),
}


def available():
    try:
        return INSTRUCTIONS[: load_library().polychip_best_instructions() + 1]
    except BackendUnavailable:
        return ()


pytestmark = pytest.mark.skipif(not available(), reason="the native kernels are not built")

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


@pytest.fixture(scope="module", params=available())
def instructions(request):
    return request.param


@pytest.fixture(scope="module")
def kernels(instructions):
    return NativeKernels(Engine(2, instructions), None)


class MainMemory:
    """What the scratch of torch's attention is on."""

    def allocate(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def copy(self, source, target):
        target.copy_(source)


class Requests:
    """Keys and values of some requests in shuffled blocks of a cache that is NaN beside them."""

    def __init__(self, dtype, tokens, heads=(9, 3), head_size=64, block_tokens=16, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.query_heads, self.kv_heads = heads
        self.q_to_kv = tuple(head * heads[1] // heads[0] for head in range(heads[0]))
        self.scale = head_size**-0.5
        counts = [-(-count // block_tokens) for count in tokens]
        order = torch.randperm(sum(counts), generator=self.generator)
        shape = (sum(counts), 2, block_tokens, self.kv_heads, head_size)
        self.arena = torch.full(shape, float("nan"), dtype=dtype)
        self.tables, self.keys, self.values, self.queries = [], [], [], []
        for count, stop in zip(counts, itertools.accumulate(counts), strict=True):
            self.tables.append(order[stop - count : stop])
        for request, count in enumerate(tokens):
            self.keys.append(self._numbers(dtype, count, self.kv_heads, head_size))
            self.values.append(self._numbers(dtype, count, self.kv_heads, head_size))
            self.queries.append(self._numbers(dtype, count, self.query_heads, head_size))
            places = torch.arange(count)
            blocks = self.tables[request][places // block_tokens]
            self.arena[blocks, 0, places % block_tokens] = self.keys[request]
            self.arena[blocks, 1, places % block_tokens] = self.values[request]

    def branch(self, request, other, tokens):
        """The first tokens of another request become the request's, in the same blocks."""
        blocks = tokens // self.arena.shape[2]
        self.tables[request][:blocks] = self.tables[other][:blocks]
        for every in (self.keys, self.values):
            every[request][:tokens] = every[other][:tokens]

    def _numbers(self, dtype, *shape):
        return torch.randn(shape, generator=self.generator).to(dtype)

    def spared(self, attention, rows, window=0):
        """Tokens of a step that are not read for a row, because they were for another one."""
        cache, queries = self.step(rows)
        attention(cache, 0, queries, self.q_to_kv, self.scale, window, 0.0)
        (plan,) = cache.step_cache.values()
        return plan.tokens_spared

    def step(self, rows):
        """Cache and queries of a step with rows of (request, context, queries)."""
        tables = torch.zeros(len(rows), max(map(len, self.tables)), dtype=torch.int64)
        for row, (request, _, _) in enumerate(rows):
            tables[row, : len(self.tables[request])] = self.tables[request]
        starts = (0, *itertools.accumulate(count for _, _, count in rows))
        nowhere = torch.zeros(starts[-1], dtype=torch.int64)
        contexts = tuple(context for _, context, _ in rows)
        cache = PagedKV(
            (self.arena[:, 0],),
            (self.arena[:, 1],),
            tables,
            nowhere,
            nowhere,
            starts,
            contexts,
            (0,) * len(rows),
        )
        queries = [self.queries[request][context : context + n] for request, context, n in rows]
        return cache, torch.cat(queries)

    def attend(self, attention, rows, window=0, soft_cap=0.0):
        """The results of each row, [queries, heads, head size]."""
        cache, queries = self.step(rows)
        found = attention(cache, 0, queries, self.q_to_kv, self.scale, window, soft_cap)
        return found.split([count for _, _, count in rows])

    def exactly(self, row, window=0, soft_cap=0.0):
        """In float64."""
        request, context, count = row
        heads = torch.tensor(self.q_to_kv)
        query = self.queries[request][context : context + count].double().transpose(0, 1)
        keys, values = (
            every[request][: context + count].double().transpose(0, 1)[heads]
            for every in (self.keys, self.values)
        )
        scores = query @ keys.transpose(1, 2) * self.scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(context, context + count)[:, None]
        token = torch.arange(context + count)
        unseen = (token > position) | ((token <= position - window) if window else False)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1)


def cuts(rng, request, tokens):
    """A prompt as rows, one for each chunk; some chunks are single tokens."""
    borders = {0, tokens, *(rng.randrange(tokens) for _ in range(rng.randrange(8)))}
    lone = rng.randrange(tokens - 1)
    borders |= {lone, lone + 1}
    return [(request, a, b - a) for a, b in itertools.pairwise(sorted(borders))]


@every_dtype
@pytest.mark.parametrize("features", FEATURES)
def test_a_prompt_gives_the_same_however_it_is_cut(kernels, dtype, features):
    requests = Requests(dtype, [300])
    (whole,) = requests.attend(kernels.attention, [(0, 0, 300)], *FEATURES[features])
    for seed in range(12):
        rows = cuts(random.Random(seed), 0, 300)
        found = [requests.attend(kernels.attention, [row], *FEATURES[features])[0] for row in rows]
        assert torch.equal(torch.cat(found), whole), f"seed {seed}: {rows}"
        together = requests.attend(kernels.attention, rows, *FEATURES[features])
        assert torch.equal(torch.cat(together), whole), f"seed {seed}, in one step"


@every_dtype
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_gives_the_same_in_any_company_and_with_any_threads(
    instructions, kernels, dtype, threads, layout
):
    """Few rows or few pairs for many threads: these share the tiles of one row."""
    others = NativeKernels(Engine(threads, instructions), None)
    lengths = [700, 1000, 40, 3100, 17, 131]
    requests = Requests(dtype, lengths, LAYOUTS[layout])
    rows = [(0, 692, 8), (1, 999, 1), (2, 0, 40), (3, 3000, 100), (4, 15, 2), (5, 130, 1)]
    alone = [requests.attend(kernels.attention, [row])[0] for row in rows]
    rng = random.Random(threads)
    for _ in range(4):
        company = rng.sample(range(len(rows)), rng.randrange(1, len(rows) + 1))
        together = requests.attend(others.attention, [rows[each] for each in company])
        for each, found in zip(company, together, strict=True):
            assert torch.equal(found, alone[each]), f"row {rows[each]} of {company}"


@every_dtype
@pytest.mark.parametrize("threads", [2, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", ["plain", "window", "window over tiles"])
def test_queries_on_both_sides_of_a_tile_s_border_give_the_same_with_any_threads(
    instructions, dtype, threads, layout, features
):
    """What threads share of such a row holds pairs that see nothing of a tile. All scores are far
    below 0: a weight of 2^0 where nothing is seen would outweigh them."""
    requests = Requests(dtype, [3000], LAYOUTS[layout])
    requests.arena[:, 0] = -8 * requests.arena[:, 0].abs()
    requests.queries = [each.abs() for each in requests.queries]
    lone = NativeKernels(Engine(1, instructions), None)
    shared = NativeKernels(Engine(threads, instructions), None)
    for row in ((0, 2044, 8), (0, 2940, 9), (0, 2945, 32), (0, 60, 6)):
        (alone,) = requests.attend(lone.attention, [row], *FEATURES[features])
        (found,) = requests.attend(shared.attention, [row], *FEATURES[features])
        assert torch.equal(found, alone), f"row {row}"
        assert found.isfinite().all()


def rms(numbers):
    return numbers.double().square().mean().sqrt().item()


ROWS = [(0, 0, 150), (1, 1500, 60), (2, 2, 1), (3, 3000, 33), (4, 1999, 1), (5, 1, 9)]
"""Of requests with as many tokens as they end at."""


def check_near(kernels, requests, window, soft_cap):
    scratch = ScratchArena(MainMemory())
    natives = requests.attend(kernels.attention, ROWS, window, soft_cap)
    torches = requests.attend(PagedAttention(lambda: scratch), ROWS, window, soft_cap)
    for row, native, other in zip(ROWS, natives, torches, strict=True):
        exact = requests.exactly(row, window, soft_cap)
        assert native.isfinite().all(), row
        # Weights are rounded to the cache's numbers: torch does not do it for scores with a cap.
        assert rms(native - exact) < 2 * rms(other - exact) + 1e-7, row


SYSTEM, FAMILY = 128, 512
FAMILIES = [0] * 3 + [3] * 2 + [5, 6]
"""Of each request the first one of its family; all have the same SYSTEM first tokens."""


def families(dtype, heads, head_size, lengths):
    requests = Requests(dtype, lengths, heads, head_size)
    for request, first in enumerate(FAMILIES):
        requests.branch(request, 0, SYSTEM)
        if lengths[request] >= FAMILY:
            requests.branch(request, first, FAMILY)
    return requests


@every_dtype
@pytest.mark.parametrize("threads", [1, 7])
@pytest.mark.parametrize(
    ("heads", "head_size"), [((9, 3), 64), ((8, 8), 40), ((80, 1), 256), ((4, 1), 128)], ids=str
)
def test_rows_behind_one_prefix_give_what_they_give_alone(
    instructions, kernels, dtype, threads, heads, head_size
):
    """Also of more query heads than a piece has room for, and where threads share its tiles."""
    others = NativeKernels(Engine(threads, instructions), None)
    lengths = [700, 513, 1100, 640, 600, 129, 200]
    requests = families(dtype, heads, head_size, lengths)
    rows = [(request, length - 1, 1) for request, length in enumerate(lengths)]
    rows += [(0, 600, 1), (2, 1000, 30), (6, 0, 130), (5, 127, 1)]
    alone = [requests.attend(kernels.attention, [row])[0] for row in rows]
    rng = random.Random(threads)
    for company in (range(len(rows)), *(rng.sample(range(len(rows)), 6) for _ in range(3))):
        some = [rows[each] for each in company]
        for row, each, found in zip(
            some, company, requests.attend(others.attention, some), strict=True
        ):
            assert torch.equal(found, alone[each]), f"row {row} of {some}"


def test_a_prefix_is_read_once_for_all_rows_behind_it(kernels):
    lengths = [700, 550, 1100, 640, 600, 129, 200]
    requests = families(torch.float32, (2, 1), 16, lengths)
    last = [(request, length - 1, 1) for request, length in enumerate(lengths)]

    def spared(*rows, window=0):
        return requests.spared(kernels.attention, rows, window)

    assert spared(last[0]) == 0
    assert spared(*last[:3]) == 2 * FAMILY
    # Who shares little with them leaves them what they share, and has others to share it with.
    assert spared(*last[:3], last[5]) == 2 * FAMILY
    assert spared(*last) == 3 * FAMILY + SYSTEM
    # Two that share more join many others, if more is spared so.
    many = [(0, 256, 1)] * 8
    assert spared(*last[:2], *many) == FAMILY + 7 * 256
    assert spared((0, 400, 1), (1, 400, 1), *many) == 9 * 256
    # Only whole tiles that each sees to their end, and only of those that decode.
    assert spared((0, 63, 1), (1, 63, 1)) == 0
    assert spared((0, 600, 2), (1, 540, 1), (2, 600, 3)) == 0
    assert spared(*last, window=5000) == 0


@every_dtype
@pytest.mark.parametrize(
    ("layout", "features"),
    [
        ("9/3", "plain"),
        ("9/3", "window over tiles"),
        ("16/8", "window"),
        ("4/1", "both"),
        ("8/8", "soft cap"),
    ],
)
def test_errors_are_those_of_torch(kernels, dtype, layout, features):
    lengths = [context + count for _, context, count in ROWS]
    requests = Requests(dtype, lengths, LAYOUTS[layout], 64)
    check_near(kernels, requests, *FEATURES[features])


@every_dtype
@pytest.mark.parametrize(
    ("head_size", "block_tokens"), [(16, 8), (30, 16), (80, 32), (96, 8), (128, 16), (256, 32)]
)
def test_errors_are_those_of_torch_with_any_head_size(kernels, dtype, head_size, block_tokens):
    lengths = [context + count for _, context, count in ROWS]
    requests = Requests(dtype, lengths, (4, 2), head_size, block_tokens)
    check_near(kernels, requests, 0, 0.0)


@every_dtype
def test_any_length_of_context(kernels, dtype):
    requests = Requests(dtype, [2000], (2, 1), 16)
    exact = requests.exactly((0, 0, 2000))
    for length in (*range(1, 35), *range(120, 140), *range(255, 258), 1000, 2000):
        first = max(0, length - 11)
        (found,) = requests.attend(kernels.attention, [(0, first, length - first)])
        assert rms(found - exact[first:length]) < (0.02 if dtype == torch.bfloat16 else 2e-6)


@every_dtype
def test_what_is_written_later_is_not_seen(kernels, dtype):
    """Behind a chunk's own tokens its last block holds what another request left."""
    requests = Requests(dtype, [200])
    rows = [(0, 100, 50), (0, 20, 3), (0, 77, 1)]
    before = requests.attend(kernels.attention, rows)
    requests.arena[requests.tables[0][150 // 16], :, 150 % 16 :] = float("nan")
    requests.arena[requests.tables[0][150 // 16 + 1 :]] = float("nan")
    for found, right in zip(requests.attend(kernels.attention, rows), before, strict=True):
        assert torch.equal(found, right)


@every_dtype
def test_rows_without_a_query_change_nothing(kernels, dtype):
    requests = Requests(dtype, [50, 20])
    cache, queries = requests.step([(0, 0, 50)])
    arguments = (requests.q_to_kv, requests.scale, 0, 0.0)
    right = kernels.attention(cache, 0, queries, *arguments)
    beside = dataclasses.replace(
        cache,
        block_tables=cache.block_tables.repeat(2, 1),
        query_starts=(0, 0, 50),
        context_starts=(0, 0),
        table_starts=(0, 0),
        step_cache={},
    )
    assert torch.equal(kernels.attention(beside, 0, queries, *arguments), right)
