"""Paged attention on CPU cores: rows of like size together, through torch's fused attention.

    rows  --like sizes-->  RowGroup  --gather-->  q, K, V padded to the group's longest row
          -->  fused attention with a mask  -->  all groups' outputs  --one gather-->  [T, h, d]

Of a row only the blocks are gathered that its window reaches. Scores with a soft cap, which the
fused kernel does not have, are computed in pieces of bounded size.

What depends only on the step (groups, masks, indices) is worked out in the first layer and kept in
the step cache of the bound cache.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional

from backends.cpu.attention_plan import RowGroup, StepPlan, plan_step
from backends.scratch import ScratchArena
from kernels.paged_kv import PagedKV

_SCORES_MAX = 1 << 22
"""Scores with a soft cap in memory at a time: 16 MiB."""


class PagedAttention:
    """The operation `attention` of `kernels.spec`.

    find_scratch: the scratch of the chip that the cache is on, asked for once a step; what is taken
    from it lasts until the step is reclaimed.
    """

    def __init__(self, find_scratch: Callable[[], ScratchArena]) -> None:
        self._find_scratch = find_scratch

    def __call__(
        self,
        cache: PagedKV,
        layer: int,
        query: torch.Tensor,
        q_to_kv: tuple[int, ...],
        scale: float,
        window: int,
        soft_cap: float,
    ) -> torch.Tensor:
        """See `attention` in `kernels.spec`."""
        key = (q_to_kv, query.dtype, window)
        plan: StepPlan | None = cache.step_cache.get(key)
        if plan is None:
            plan = plan_step(cache, q_to_kv, query.dtype, window, self._find_scratch())
            cache.step_cache[key] = plan
        head_size = query.shape[-1]
        flat_query = query.reshape(-1, head_size)
        outputs = [
            _attend(group, cache.keys[layer], cache.values[layer], flat_query, scale, soft_cap)
            for group in plan.groups
        ]
        flat_output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat_output.index_select(0, plan.output_index).view(query.shape)


def _attend(
    group: RowGroup,
    layer_keys: torch.Tensor,
    layer_values: torch.Tensor,
    flat_query: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """The group's outputs, [n * padded queries * padded heads, d], in the order of its query."""
    keys = _gather(group, layer_keys, group.keys)
    values = _gather(group, layer_values, group.values)
    query = flat_query.index_select(0, group.query_index).view(*group.query_shape, -1)
    if soft_cap:
        outputs = _attend_capped(query, keys, values, group.mask, scale, soft_cap)
    else:
        outputs = [
            functional.scaled_dot_product_attention(
                part, keys, values, group.mask, is_causal=group.mask is None, scale=scale
            )
            for part in query
        ]
    return torch.cat([output.reshape(-1, query.shape[-1]) for output in outputs])


def _attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> list[torch.Tensor]:
    """The outputs [n, k, q, d] of each part of the query [parts, n, k, q, d]; float32 inside."""
    keys, values = keys.float().transpose(-1, -2), values.float()
    queries, tokens = query.shape[-2], keys.shape[-1]
    if mask is None:
        mask = torch.full((1, 1, queries, tokens), -math.inf).triu_(1)
    mask = mask.expand(-1, -1, queries, -1)
    piece = max(1, _SCORES_MAX // (query.shape[1] * query.shape[2] * tokens))
    outputs = []
    for part in query:
        output = torch.empty_like(part)
        for start in range(0, queries, piece):
            rows = slice(start, start + piece)
            scores = (part[:, :, rows].float() @ keys).mul_(scale / soft_cap)
            weights = scores.tanh_().mul_(soft_cap).add_(mask[:, :, rows]).softmax(-1)
            output[:, :, rows] = weights @ values
        outputs.append(output)
    return outputs


def _gather(group: RowGroup, arena: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    """Keys or values of the group's rows, [n, k, L, d], as a view of the reused `gathered`."""
    torch.index_select(arena, 0, group.blocks, out=gathered)
    rows_count = group.query_shape[1]
    by_token = gathered.view(-1, *arena.shape[2:])
    if group.unseen.numel():
        # What was never written there may be NaN, and zero weight times NaN is NaN.
        by_token.index_fill_(0, group.unseen, 0)
    by_row = by_token.view(rows_count, -1, *arena.shape[2:])
    return by_row[:, : group.tokens_max].transpose(1, 2)
