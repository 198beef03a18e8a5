"""The part of paged attention that depends on the step only: row groups, indices and masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from backends.scratch import Lifetime, ScratchArena
from kernels.paged_kv import PagedKV

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows attended to together: n rows, each padded to q queries and to the longest context.

    query_shape: (parts, n, k, queries of a part); one fused call a part. A part holds all query
    heads of a key head if rows have one query each, else one query head of every key head.
    query_index: what fills that shape, as rows of the step's query seen as [T * h, d].
    mask: 0 or -inf, broadcast to [n, k, queries of a part, L]; None: plainly causal.
    blocks: [n * blocks of the longest row]. unseen: gathered tokens that their row does not see, in
    front of its window or past its end.
    keys, values: where blocks are gathered to, step scratch, the same from layer to layer.
    """

    query_shape: tuple[int, int, int, int]
    query_index: torch.Tensor
    mask: torch.Tensor | None
    tokens_max: int
    blocks: torch.Tensor
    unseen: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The groups of a step, and where in their outputs, end to end, each row of [T * h, d] is."""

    groups: tuple[RowGroup, ...]
    output_index: torch.Tensor


@dataclass(frozen=True, eq=False)
class HeadMap:
    """Query heads by key head: table [k, g], short ones padded, and the places in it."""

    query_heads: int
    table: Int64Array
    key_heads_of: Int64Array
    places_of: Int64Array

    @classmethod
    def of(cls, q_to_kv: tuple[int, ...], key_heads: int) -> "HeadMap":
        """Padding repeats query head 0; what is computed for it is never read."""
        members: list[list[int]] = [[] for _ in range(key_heads)]
        places = []
        for query_head, key_head in enumerate(q_to_kv):
            places.append(len(members[key_head]))
            members[key_head].append(query_head)
        table = np.zeros((key_heads, max(map(len, members))), dtype=np.int64)
        for key_head, heads in enumerate(members):
            table[key_head, : len(heads)] = heads
        return cls(
            len(q_to_kv), table, np.array(q_to_kv, dtype=np.int64), np.array(places, dtype=np.int64)
        )


@dataclass(frozen=True, eq=False)
class Spans:
    """Rows of a step, and what of its tokens each gathers: whole blocks that its window reaches.

    block table   [ skipped ][ skipped ][ seen ][ seen ][ seen ]
    gathered                            |-- 0 .. seen_from .. first query .. length
    """

    starts: Int64Array
    """First token of the row in the step."""
    counts: Int64Array
    skipped: Int64Array
    seen_from: Int64Array
    first_query: Int64Array
    length: Int64Array

    @classmethod
    def of(cls, cache: PagedKV, window: int) -> "Spans":
        """All rows of a bound step."""
        starts = np.array(cache.query_starts, dtype=np.int64)
        counts = np.diff(starts)
        contexts = np.array(cache.context_starts, dtype=np.int64)
        table_starts = np.array(cache.table_starts, dtype=np.int64)
        seen_from = np.maximum(contexts - window + 1, 0) if window else np.zeros_like(contexts)
        assert (table_starts <= seen_from).all(), "a row sees tokens that are not held any more"
        skipped = (seen_from - table_starts) // cache.block_tokens
        gathered_from = table_starts + skipped * cache.block_tokens
        first_query = contexts - gathered_from
        return cls(
            starts[:-1],
            counts,
            skipped,
            seen_from - gathered_from,
            first_query,
            first_query + counts,
        )

    def __getitem__(self, rows: Int64Array) -> "Spans":
        return Spans(*(getattr(self, field.name)[rows] for field in fields(self)))


def plan_step(
    cache: PagedKV,
    q_to_kv: tuple[int, ...],
    dtype: torch.dtype,
    window: int,
    scratch: ScratchArena,
) -> StepPlan:
    """Sorts the rows of a bound step into groups."""
    heads = HeadMap.of(q_to_kv, cache.keys[0].shape[2])
    spans = Spans.of(cache, window)
    output_index = np.zeros((cache.query_starts[-1], heads.query_heads), dtype=np.int64)
    groups = []
    outputs_count = 0
    take = partial(scratch.take, Lifetime.STEP, "attention")
    for rows in _like_rows(spans):
        members = spans[rows]
        group, offsets = _plan_group(cache, heads, rows, members, dtype, window, take)
        tokens, places = _tokens_of(members)
        output_index[tokens] = outputs_count + offsets[places]
        outputs_count += int(np.prod(group.query_shape))
        groups.append(group)
    return StepPlan(tuple(groups), torch.from_numpy(output_index.reshape(-1)))


def _like_rows(spans: Spans) -> list[Int64Array]:
    """Rows whose query counts and whose lengths have the same number of bits: padding < 2x."""
    by_size: dict[tuple[int, int], list[int]] = {}
    sizes = zip(spans.counts.tolist(), spans.length.tolist(), strict=True)
    for row, (count, length) in enumerate(sizes):
        if count:
            by_size.setdefault(((count - 1).bit_length(), length.bit_length()), []).append(row)
    return [np.array(rows, dtype=np.int64) for rows in by_size.values()]


def _tokens_of(spans: Spans) -> tuple[Int64Array, tuple[Int64Array, Int64Array]]:
    """The step's tokens of some rows, and for each its (row, query) among them."""
    counts = spans.counts
    row = np.repeat(np.arange(len(counts)), counts)
    query = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return spans.starts[row] + query, (row, query)


def _plan_group(
    cache: PagedKV,
    heads: HeadMap,
    rows: Int64Array,
    spans: Spans,
    dtype: torch.dtype,
    window: int,
    take: Callable[[Sequence[int], torch.dtype], torch.Tensor],
) -> tuple[RowGroup, Int64Array]:
    """A group, and where in its outputs (row, query, query head) is: [n, q, h]."""
    # A row with fewer queries repeats its last one.
    query = np.minimum(np.arange(int(spans.counts.max()))[None, :], spans.counts[:, None] - 1)
    shape, query_index, offsets = _arrange(heads, spans.starts[:, None] + query)
    tokens_max = int(spans.length.max())
    blocks_each = -(-tokens_max // cache.block_tokens)
    # A row with fewer blocks repeats the last of its table, padding included.
    columns = spans.skipped[:, None] + np.arange(blocks_each)
    columns = np.minimum(columns, cache.block_tables.shape[1] - 1)
    blocks = cache.block_tables[torch.from_numpy(rows)[:, None], torch.from_numpy(columns)]
    blocks = blocks.reshape(-1)
    places = np.arange(blocks_each * cache.block_tokens)[None, :]
    unseen = places >= spans.length[:, None]
    if window:
        unseen |= places < spans.seen_from[:, None]
    gathered_shape = (len(blocks), *cache.keys[0].shape[1:])
    group = RowGroup(
        query_shape=shape,
        query_index=torch.from_numpy(query_index),
        mask=_mask(spans.first_query[:, None] + query, tokens_max, window, dtype),
        tokens_max=tokens_max,
        blocks=blocks,
        unseen=torch.from_numpy(np.flatnonzero(unseen)),
        keys=take(gathered_shape, cache.keys[0].dtype),
        values=take(gathered_shape, cache.values[0].dtype),
    )
    return group, offsets


def _arrange(
    heads: HeadMap, tokens: Int64Array
) -> tuple[tuple[int, int, int, int], Int64Array, Int64Array]:
    """The query shape for tokens [n, q], what fills it, and where in it [n, q, h] are.

    One query a row:  1 part,  [n, k, g]     the heads of a key head are its queries
    several:          g parts, [n, k, q]     K, V and mask are shared by the parts, uncopied
    """
    rows_count, queries = tokens.shape
    key_heads, together = heads.table.shape
    row = np.arange(rows_count)[:, None, None]
    flat = tokens[:, :, None, None] * heads.query_heads + heads.table
    if queries == 1:
        offsets = (row * key_heads + heads.key_heads_of) * together + heads.places_of
        return (1, rows_count, key_heads, together), flat.reshape(-1), offsets
    part = heads.places_of * rows_count + row
    offsets = (part * key_heads + heads.key_heads_of) * queries
    offsets = offsets + np.arange(queries)[None, :, None]
    query_index = flat.transpose(3, 0, 2, 1).reshape(-1)
    return (together, rows_count, key_heads, queries), query_index, offsets


def _mask(
    places: Int64Array, tokens_max: int, window: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What queries at `places` [n, q] of the gathered tokens see: [n, 1, q, L] of 0 and -inf."""
    rows_count, queries = places.shape
    if rows_count == 1 and queries == tokens_max > 1 and not 0 < window < queries:
        return None
    gathered, own = np.arange(tokens_max)[None, None, :], places[:, :, None]
    hidden = gathered > own
    if window:
        hidden |= gathered <= own - window
    mask = torch.zeros((rows_count, 1, queries, tokens_max), dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden)[:, None], float("-inf"))
