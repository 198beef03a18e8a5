"""Attention over blocks of a backend against the reference: batches, heads, windows, soft caps."""

import pytest
import torch

from backends.interface import KVSpec, Requirement
from kernels.spec import SOFT_CAP, WINDOW
from tests.backends.kernel_calls import PLACEMENTS, check_close
from tests.backends.mirrored_pool import MirroredPool, shuffled_rows


@pytest.fixture(params=["dense", *PLACEMENTS])
def placement(request):
    """How the operand lies on the chip."""
    return None if request.param == "dense" else request.param


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
    "few tokens": [(126, 4), (127, 1), (128, 8), (300, 2), (0, 5), (3, 1), (12, 7)],
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
def attend(runtime, device, call, dtype, backend):
    """Writes and reads a batch in every layer and compares with the reference.

    slack: tokens behind the window whose blocks are still held; None holds all from the first.
    """
    generator = torch.Generator().manual_seed(7)
    opened = []

    def run(
        batch,
        q_to_kv,
        head_size=16,
        block_tokens=16,
        placement=None,
        window=0,
        soft_cap=0.0,
        slack=0,
    ):
        if len(batch) > backend.capabilities.rows_max:
            pytest.skip(f"unsupported: more than {backend.capabilities.rows_max} rows in a step")
        spec = KVSpec(2, max(q_to_kv) + 1, head_size, block_tokens, dtype)
        held = 0 if slack is None or not window else window + slack
        rows, blocks = shuffled_rows(batch, block_tokens, generator, held)
        pool = MirroredPool(runtime, device, spec, blocks, call)
        opened.append(pool)
        pool.poison()
        pool.fill_context(rows, generator)
        if window:
            pool.poison_unseen(rows, window)
        tokens = rows.query_starts[-1]
        for layer in range(spec.layers):
            key, value = pool.keys_and_values(tokens, generator)
            pool.write(rows, layer, key, value, placement)
            query = torch.randn(tokens, len(q_to_kv), head_size, generator=generator).to(dtype)
            actual, expected = pool.attend(
                rows, layer, query, q_to_kv, 0.25, placement, window, soft_cap
            )
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
@pytest.mark.parametrize("batch", ["mixed", "few tokens", "decode, unlike lengths"])
def test_attention_with_any_map_of_heads(attend, batch, heads):
    attend(BATCHES[batch], HEAD_MAPS[heads])


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("head_size", [2, 20, 64, 128, 256, 320])
@pytest.mark.parametrize("batch", ["mixed", "few tokens"])
def test_attention_with_any_head_size(attend, batch, head_size):
    attend(BATCHES[batch], HEAD_MAPS["uneven, 4 and 1"], head_size=head_size)


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("times", [1, 3, 8])
@pytest.mark.parametrize("batch", ["mixed", "few tokens"])
def test_attention_with_any_block_the_backend_allows(attend, backend, batch, times):
    block_tokens = backend.capabilities.block_tokens_multiple * times
    attend(BATCHES[batch], HEAD_MAPS["one each"], block_tokens=block_tokens)


@pytest.mark.covers("attention", "write_kv")
@pytest.mark.parametrize("batch", ["mixed", "few tokens"])
def test_attention_of_views(attend, batch, placement):
    attend(BATCHES[batch], HEAD_MAPS["even"], placement=placement)


# ---------------------------------------------------------------- windows and soft caps

# Smaller than a block, of one, over its edge, as long as contexts are, longer.
WINDOWS = (1, 5, 16, 17, 38, 4096)
WINDOWED = (
    *("one decode", "first token", "whole prompt", "prefix and chunk"),
    *("decode, unlike lengths", "few tokens", "mixed"),
)


@pytest.mark.covers("attention", "write_kv", "attention:window")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch", WINDOWED)
def test_attention_within_a_window(attend, batch, window):
    """Blocks behind the window are given back; what is held of them but not seen is NaN."""
    attend(BATCHES[batch], HEAD_MAPS["uneven, low rank"], window=window)


@pytest.mark.covers("attention", "write_kv", "attention:window")
@pytest.mark.parametrize("batch", ["32 decode", "129 rows", "1024 rows", "many blocks"])
def test_attention_of_many_rows_or_tokens_within_a_window(attend, batch):
    attend(BATCHES[batch], HEAD_MAPS["even"], window=9)


@pytest.mark.covers("attention", "write_kv", "attention:window")
@pytest.mark.parametrize("slack", [1, 16, 40, None])
@pytest.mark.parametrize("batch", ["mixed", "few tokens"])
def test_what_lies_behind_a_window_and_is_still_held_is_not_seen(attend, batch, slack):
    attend(BATCHES[batch], HEAD_MAPS["even"], window=20, slack=slack)


@pytest.mark.covers("attention", "write_kv", "attention:soft_cap")
@pytest.mark.parametrize("batch", [*WINDOWED, "32 decode", "129 rows"])
@pytest.mark.parametrize("soft_cap", [0.7, 1e6])
def test_attention_with_bounded_scores(attend, batch, soft_cap):
    attend(BATCHES[batch], HEAD_MAPS["uneven, low rank"], soft_cap=soft_cap)


@pytest.mark.covers("attention", "write_kv", "attention:window", "attention:soft_cap")
@pytest.mark.parametrize("heads", HEAD_MAPS)
@pytest.mark.parametrize("batch", ["mixed", "few tokens"])
def test_window_and_soft_cap_together_with_any_map_of_heads(attend, batch, heads):
    attend(BATCHES[batch], HEAD_MAPS[heads], window=18, soft_cap=0.7)


@pytest.mark.covers("attention", "write_kv", "attention:window", "attention:soft_cap")
@pytest.mark.parametrize("features", [{"window": 18}, {"soft_cap": 0.7}])
def test_window_and_soft_cap_of_views(attend, placement, features):
    attend(BATCHES["mixed"], HEAD_MAPS["even"], placement=placement, **features)


@pytest.mark.covers("attention", "write_kv", "attention:window")
@pytest.mark.parametrize("window", [3, 60])
def test_a_window_over_any_block_the_backend_allows(attend, backend, window):
    for times in (1, 8):
        block_tokens = backend.capabilities.block_tokens_multiple * times
        attend(BATCHES["mixed"], HEAD_MAPS["one each"], block_tokens=block_tokens, window=window)


@pytest.mark.covers("attention", "attention:window", "attention:soft_cap")
@pytest.mark.parametrize("features", [(WINDOW,), (SOFT_CAP,), (WINDOW, SOFT_CAP)])
def test_every_feature_is_bound_and_says_by_what(runtime, features):
    layout = runtime.kv_layout(KVSpec(1, 1, 16, 16, torch.float32)).order
    requirement = Requirement("float32", layout=layout, features=features)
    (choice,) = runtime.bind_kernels({"attention": requirement}).explain()
    assert choice.implementation
    assert choice.reason
