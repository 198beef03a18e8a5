"""The operations over a step's rows: keys and values through the pool, adjusting, drawing, scoring.

The pool is the epoch's own, before any request uses it: real layout, real places, the last block
among them.
"""

import torch

from backends.interface import BatchRows, MemoryPool
from backends.probes import ProbeFailed
from chip_worker.numeric_check import NumericCheck
from chip_worker.sampler import ADJUST_OPERATION, SAMPLE_OPERATION
from chip_worker.shard_loader import LoadedShard
from chip_worker.token_scores import LOGPROBS_OPERATION

VOCABULARY_MAX = 2048
"""Logits of a row; more would only make the start longer."""
TOPS_COUNT = 5


def probe_attention(
    check: NumericCheck,
    pool: MemoryPool,
    loaded: LoadedShard,
    blocks: list[int],
    rows: int,
    context_tokens: int,
) -> None:
    """A prefill of rows of uneven length, then a decode step, in the first and the last layer.

    blocks: all of the pool. For every window that layers have: the first row then begins with more
    tokens held than it sees, unless pool or context end before. Nothing is done where the pool has
    fewer blocks than there are rows. Raises ProbeFailed.
    """
    try:
        for window in sorted(set(loaded.kv_groups.windows)):
            _probe_window(check, pool, loaded, blocks, rows, context_tokens, window)
    except ProbeFailed as error:
        writing = check.kernels.choices["write_kv"].implementation
        raise ProbeFailed(
            f"{error}; or 'write_kv' (implementation {writing!r}) did not write what it read"
        ) from error


def _probe_window(
    check: NumericCheck,
    pool: MemoryPool,
    loaded: LoadedShard,
    blocks: list[int],
    rows: int,
    context_tokens: int,
    window: int,
) -> None:
    block_tokens = pool.spec.block_tokens
    row_blocks = min(3, len(blocks) // rows)
    held = min(row_blocks * block_tokens, context_tokens, check.rows_max // rows)
    if held < 1:
        return
    lengths = [1 + (7 * row + block_tokens + 1) % max(1, held - 1) for row in range(rows)]
    tables = [
        [blocks[-1 - row - rows * block] for block in range(row_blocks)] for row in range(rows)
    ]
    history = _History(check, pool, loaded, tables, window)
    # As if its first block had been dropped: then its places are not its positions.
    start = block_tokens
    tokens = window + lengths[0] + 1
    more = blocks[: max(0, -(-tokens // block_tokens) - row_blocks)]
    room = len(blocks) - rows * row_blocks
    if window and len(more) <= room and start + tokens <= context_tokens:
        tables[0] += more
        history.hold(start, window)
    history.step(lengths)
    if held > 1:
        history.step([1] * rows)


class _History:
    """What the rows hold so far: in the pool, and beside it on the host."""

    def __init__(
        self,
        check: NumericCheck,
        pool: MemoryPool,
        loaded: LoadedShard,
        tables: list[list[int]],
        window: int,
    ) -> None:
        config, self._shard = loaded.config, loaded.shard
        self._check = check
        self._pool = pool
        self._tables = tables
        self._window = window
        self._head_size = config.head_size
        self._scale = config.score_scale
        self._soft_cap = config.attention_soft_cap
        self._layers = sorted({0, pool.spec.layers - 1})
        self._starts = [0] * len(tables)
        empty = torch.empty(0, len(self._shard.kv_heads), self._head_size)
        self._held = {layer: [(empty, empty)] * len(tables) for layer in self._layers}

    def hold(self, start: int, count: int) -> None:
        """Row 0 begins with so many tokens from position `start` on."""
        self._starts[0] = start
        check, shape = self._check, (len(self._shard.kv_heads), self._head_size)
        for first in range(0, count, check.rows_max):
            tokens = min(check.rows_max, count - first)
            rows = BatchRows((0, tokens), (start + first,), (self._tables[0],), (start,))
            cache = self._pool.bind(rows)
            for layer, held in self._held.items():
                written = [check.random(tokens, *shape) for _ in range(2)]
                # One place for all pieces: a window may be longer than any step.
                placed = [
                    check.memory.buffer("attention", each.shape, each.dtype, part)
                    for part, each in enumerate(written)
                ]
                for each, target in zip(written, placed, strict=True):
                    check.memory.device.copy(each, target)
                check.kernels.dispatch("write_kv", cache, layer, *placed)
                keys, values = (
                    torch.cat((old, new.float())) for old, new in zip(held[0], written, strict=True)
                )
                held[0] = keys, values

    def step(self, lengths: list[int]) -> None:
        """Writes and attends so many tokens of every row."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        held = self._held[0]
        contexts = [start + len(keys) for start, (keys, _) in zip(self._starts, held, strict=True)]
        cache = self._pool.bind(
            BatchRows(tuple(starts), tuple(contexts), tuple(self._tables), tuple(self._starts))
        )
        query_heads, kv_heads = len(self._shard.query_heads), len(self._shard.kv_heads)
        check = self._check
        projected = {
            layer: check.random(starts[-1], query_heads + 2 * kv_heads, self._head_size)
            for layer in self._layers
        }
        heads = [query_heads, kv_heads, kv_heads]
        queries = {}
        for layer, values in projected.items():
            # Views of one tensor, as in the model.
            query, key, value = torch.split(check.memory.place("attention", values), heads, dim=1)
            check.kernels.dispatch("write_kv", cache, layer, key, value)
            queries[layer] = query
        rest = (self._shard.q_to_kv, self._scale, self._window, self._soft_cap)
        for layer, query in queries.items():
            found = check.kernels.dispatch("attention", cache, layer, query, *rest)
            expected = self._expected(
                layer, torch.split(projected[layer].float(), heads, dim=1), starts
            )
            check.same_rows("attention", len(lengths), check.to_host(found), expected)

    def _expected(
        self, layer: int, parts: tuple[torch.Tensor, ...], starts: list[int]
    ) -> torch.Tensor:
        """[T, h, d]; remembers keys and values."""
        outputs = []
        for row, (keys, values) in enumerate(self._held[layer]):
            query, key, value = (part[starts[row] : starts[row + 1]] for part in parts)
            keys, values = torch.cat((keys, key)), torch.cat((values, value))
            self._held[layer][row] = keys, values
            outputs.append(self._attend(query, keys, values))
        return torch.cat(outputs)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """softmax(scale * q k^T) v, causal: the query's tokens are the last of the keys'."""
        heads = list(self._shard.q_to_kv)
        scores = torch.einsum("qhd,lhd->hql", query, keys[:, heads]) * self._scale
        if self._soft_cap:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        before = len(keys) - len(query)
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(before + 1)
        if self._window:
            unseen |= torch.ones_like(unseen).tril(before - self._window)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hql,lhd->qhd", weights, values[:, heads])


def probe_sampling(check: NumericCheck, rows: int, vocabulary: int) -> None:
    """Adjusts, draws and scores random logits. Raises ProbeFailed."""
    vocabulary = min(vocabulary, VOCABULARY_MAX)
    logits = 3 * check.random(rows, vocabulary).float()
    _probe_adjusting(check, logits)
    places = torch.arange(rows)
    keys = (
        torch.tensor([0.0, 0.7, 1.3])[places % 3],
        places * 7919 - 3,
        places % 2,
        places,
        torch.tensor([0, 40, 0, 3])[places % 4],
        torch.tensor([1.0, 0.9])[places % 2],
        torch.tensor([0.0, 0.0, 0.05])[places % 3],
    )
    check.rows(SAMPLE_OPERATION, (logits, *keys))
    ids = torch.randint(vocabulary, (rows,), generator=check.generator)
    check.rows(LOGPROBS_OPERATION, (logits, ids), min(TOPS_COUNT, vocabulary))


def _probe_adjusting(check: NumericCheck, logits: torch.Tensor) -> None:
    """One token of every row, by every rule at once, each of which moves it by more than a part."""
    rows, vocabulary = logits.shape
    row = torch.arange(rows)
    token = row * 31 % vocabulary
    columns = (
        row,
        token,
        50.0 + logits[row, token],
        row % 3,
        torch.full((rows,), 5.0),
        torch.full((rows,), 3.0),
        torch.full((rows,), 1.5),
    )
    found = check.call(ADJUST_OPERATION, logits, *columns)
    expected = check.runtime.fallback(ADJUST_OPERATION, logits, *columns)
    check.same_rows(ADJUST_OPERATION, rows, found, expected)
    adjusted = (each[row, token][:, None] for each in (found, expected))
    check.same_rows(ADJUST_OPERATION, rows, *adjusted)
