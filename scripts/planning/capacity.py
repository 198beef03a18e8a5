"""How many KV blocks a layout gets, and what they hold: as the worker and the control plane count.

free memory - workers - weights --default_capacity--> blocks of every rank --> least --> requests
"""

import math
from dataclasses import dataclass, replace

from backends.errors import OutOfMemory
from chip_worker.config import WorkerConfig
from chip_worker.kv_capacity import default_capacity
from control_plane.scheduling.kv_groups import KVGroups
from scripts.planning.layouts import Layout
from scripts.planning.needs import Chips, GroupNeeds, RankNeeds

WORKER = WorkerConfig(worker_id="plan", control_plane="", model_path="")
"""A worker's defaults, the share of free memory and its reserve among them."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be served: the settings of `serve`, and requests of full length at least."""

    context_tokens: int
    block_tokens: int
    chunk_tokens: int
    running_max: int
    requests_min: int

    def kv_groups(self, windows: tuple[int, ...]) -> KVGroups:
        """The control plane's arithmetic for a model with these windows."""
        return KVGroups(windows, self.block_tokens, self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a layout holds; all bytes are of the chip that is worst off.

    blocks: what workers take by themselves, in the smallest pool of a group; 0 where not one fits.
    blocks_most: what --kv-blocks may say. blocks_needed: for the requests that are wished for.
    block_tokens_held: tokens of so many full blocks. requests: of full length at once, in one
    group. token_bytes: of KV a further token takes. window_bytes: of KV a request takes beside
    them, behind windows, at most. left_bytes: free beside weights and KV. missing_bytes: for what
    is wished for.
    """

    layout: Layout
    needs: GroupNeeds
    blocks: int
    blocks_most: int
    blocks_needed: int
    tokens: int
    requests: int
    token_bytes: int
    window_bytes: int
    left_bytes: int
    missing_bytes: int

    @property
    def serves(self) -> bool:
        """Whether workers by themselves take as many blocks as are needed."""
        return self.blocks >= self.blocks_needed

    @property
    def can_serve(self) -> bool:
        """The same, if --kv-blocks may be set."""
        return max(self.blocks, self.blocks_most) >= self.blocks_needed

    @property
    def holds_weights(self) -> bool:
        """Whether there is room for more than the weights."""
        return self.blocks_most > 0


def capacity(
    layout: Layout, needs: GroupNeeds, chips: Chips, kv_groups: KVGroups, wishes: Wishes
) -> Capacity:
    """What one layout holds under one KV policy."""
    context = wishes.context_tokens
    request_blocks = kv_groups.cost(context)
    wanted, needed = wishes.running_max * request_blocks, wishes.requests_min * request_blocks
    config = replace(WORKER, chips_on_host=layout.chips_used)
    free = [_free_bytes(rank, layout, needs, chips) for rank in needs.ranks]
    pairs = list(zip(needs.ranks, free, strict=True))
    every = replace(config, kv_memory_fraction=1.0)
    blocks = min(_blocks(config, wanted, rank, left, chips.shared) for rank, left in pairs)
    most = min(_blocks(every, wanted, rank, left, chips.shared) for rank, left in pairs)
    sharing = layout.chips_used if chips.shared else 1
    missing = max(
        math.ceil(needed * rank.block_bytes / (1.0 - config.kv_memory_reserve)) - left // sharing
        for rank, left in pairs
    )
    whole_bytes = len(kv_groups.whole) * needs.block_bytes
    held_blocks = kv_groups.blocks_for(context)
    return Capacity(
        layout=layout,
        needs=needs,
        blocks=blocks,
        blocks_most=most,
        blocks_needed=needed,
        tokens=blocks * held_blocks * wishes.block_tokens // request_blocks,
        requests=blocks // request_blocks,
        token_bytes=-(-whole_bytes // wishes.block_tokens),
        window_bytes=request_blocks * needs.block_bytes - held_blocks * whole_bytes,
        left_bytes=min(left // sharing - blocks * rank.block_bytes for rank, left in pairs),
        missing_bytes=max(0, missing),
    )


def _free_bytes(rank: RankNeeds, layout: Layout, needs: GroupNeeds, chips: Chips) -> int:
    """What is free for this rank's pool, and on a shared host for all, once all weights are there.

    Below 0 where they do not fit. One worker's own memory was taken when `free_bytes` was read.
    """
    if not chips.shared:
        return chips.free_bytes - rank.weight_bytes
    weight_bytes = layout.groups * sum(each.weight_bytes for each in needs.ranks)
    return chips.free_bytes - (layout.chips_used - 1) * chips.process_bytes - weight_bytes


def _blocks(
    config: WorkerConfig, wanted: int, rank: RankNeeds, free_bytes: int, shared: bool
) -> int:
    try:
        return default_capacity(config, wanted, rank.block_bytes, free_bytes, shared=shared)
    except OutOfMemory:
        return 0
