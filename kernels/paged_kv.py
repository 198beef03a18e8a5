"""The "paged" layout: what the reference and any kernel that declares the layout see of a pool.

arena   [blocks, layers, 2 (keys, values), block_tokens, kv_heads, head_size]: a block is one piece
token at position p of row r, t = p - table_starts[r]
                  ->  block block_tables[r, t // block_tokens], place t % block_tokens
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.spec import BoundKV

PAGED_ORDER = "paged"


class StepPlan(ABC):
    """What a kernel works out once per step of a cache that is bound again for the next one."""

    @abstractmethod
    def renew(self, cache: "PagedKV") -> None:
        """Works it out for the rows that are bound now, in place: captured work refers to it."""


@dataclass(eq=False)
class PagedKV(BoundKV):
    """A paged arena with the rows of one step; block ids here are physical.

    keys, values: of each layer, views [blocks, block_tokens, kv_heads, head_size] of the arena; the
    last three axes are contiguous, from block to block lies the rest of the block.
    block_tables: [rows, most blocks of a row] int64, padded with block 0.
    token_blocks, token_places: [T] int64, where each token of the step is to be written.
    query_starts: rows + 1 positions in the step's token dimension; context_starts: for each row the
    position in its request of its first token; table_starts: of the first token in its first block,
    above 0 where what lies behind a window is no longer held.
    step_cache: what a kernel works out once per step and reads again in the other layers; where it
    is a StepPlan it outlives the step.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_tables: torch.Tensor
    token_blocks: torch.Tensor
    token_places: torch.Tensor
    query_starts: tuple[int, ...]
    context_starts: tuple[int, ...]
    table_starts: tuple[int, ...]
    step_cache: dict[Any, Any] = field(default_factory=dict)

    def renew_plans(self) -> None:
        """Other rows were bound: what was worked out for those before is renewed or dropped."""
        plans = {key: plan for key, plan in self.step_cache.items() if isinstance(plan, StepPlan)}
        self.step_cache.clear()
        self.step_cache.update(plans)
        for plan in plans.values():
            plan.renew(self)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.keys[0].shape[1]
