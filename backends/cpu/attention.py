"""Paged attention on CPU cores: rows of like size together, through torch's fused attention.

    rows  --like sizes-->  RowGroup  --gather-->  q, K, V padded to the group's longest row
          -->  fused attention with a mask  -->  all groups' outputs  --one gather-->  [T, h, d]

What depends only on the step (groups, masks, indices) is worked out in the first layer and kept in
the step cache of the bound cache.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as functional

from backends.cpu.attention_plan import RowGroup, StepPlan, plan_step
from backends.scratch import ScratchArena
from kernels.paged_kv import PagedKV


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
    ) -> torch.Tensor:
        """See `attention` in `kernels.spec`."""
        key = (q_to_kv, query.dtype)
        plan: StepPlan | None = cache.step_cache.get(key)
        if plan is None:
            plan = plan_step(cache, q_to_kv, query.dtype, self._find_scratch())
            cache.step_cache[key] = plan
        head_size = query.shape[-1]
        flat_query = query.reshape(-1, head_size)
        outputs = [
            _attend(group, cache.keys[layer], cache.values[layer], flat_query, scale)
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
) -> torch.Tensor:
    """The group's outputs, [n * padded queries * padded heads, d], in the order of its query."""
    keys = _gather(group, layer_keys, group.keys)
    values = _gather(group, layer_values, group.values)
    query = flat_query.index_select(0, group.query_index).view(*group.query_shape, -1)
    outputs = [
        functional.scaled_dot_product_attention(
            part, keys, values, group.mask, is_causal=group.mask is None, scale=scale
        )
        for part in query
    ]
    return torch.cat([output.reshape(-1, query.shape[-1]) for output in outputs])


def _gather(group: RowGroup, arena: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    """Keys or values of the group's rows, [n, k, L, d], as a view of the reused `gathered`."""
    torch.index_select(arena, 0, group.blocks, out=gathered)
    rows_count = group.query_shape[1]
    by_token = gathered.view(-1, *arena.shape[2:])
    if group.unwritten.numel():
        # What was never written there may be NaN, and zero weight times NaN is NaN.
        by_token.index_fill_(0, group.unwritten, 0)
    by_row = by_token.view(rows_count, -1, *arena.shape[2:])
    return by_row[:, : group.tokens_max].transpose(1, 2)
