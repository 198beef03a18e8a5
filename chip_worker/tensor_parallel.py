"""Who holds what in a tensor-parallel group: a pure plan of one rank's shard.

query heads  |--- rank 0 ---|--- rank 1 ---|     split as evenly as whole heads allow
kv heads     |--- 0,1 ---|                       cover: those the rank's query heads touch
                       |--- 1,2 ---|             (a head on a border is on both ranks)
"""

from dataclasses import dataclass
from itertools import pairwise

from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig

KV_POLICIES = ("cover", "replicate", "shard")

# Sizes that vectorized kernels like to see in every shard.
INTERMEDIATE_GRAIN = 32
VOCABULARY_GRAIN = 64


@dataclass(frozen=True)
class ShardPlan:
    """The part of the model one rank holds, as half-open ranges of the whole.

    q_to_kv[i]: position in `kv_heads` of the head that local query head i attends to.
    """

    rank: int
    world_size: int
    query_heads: range
    kv_heads: range
    q_to_kv: tuple[int, ...]
    intermediate: range
    vocabulary: tuple[range, ...]
    """Of every rank: rank 0 puts the logits together from all of them."""

    @property
    def vocabulary_rows(self) -> range:
        """This rank's rows of embedding and LM head."""
        return self.vocabulary[self.rank]


def plan_shard(config: ModelConfig, rank: int, world_size: int, kv_policy: str) -> ShardPlan:
    """The shard of `rank`. Raises ModelError naming the sizes that work when this one does not."""
    if kv_policy not in KV_POLICIES:
        raise ModelError(f"kv policy {kv_policy!r}; choose one of {', '.join(KV_POLICIES)}")
    if not 0 <= rank < world_size:
        raise ModelError(f"rank {rank} is not in a group of {world_size}")
    units, unit_name = (
        (config.kv_heads, "key/value heads")
        if kv_policy == "shard"
        else (config.query_heads, "query heads")
    )
    if world_size > units:
        raise ModelError(
            f"a group of {world_size} chips cannot share {units} {unit_name} "
            f"(kv policy {kv_policy!r}); use 1 to {units} chips per group"
        )
    query_per_kv = config.query_heads // config.kv_heads
    if kv_policy == "shard":
        kv_heads = split_evenly(config.kv_heads, world_size)[rank]
        query_heads = range(kv_heads.start * query_per_kv, kv_heads.stop * query_per_kv)
    else:
        query_heads = split_evenly(config.query_heads, world_size)[rank]
        kv_heads = (
            range(config.kv_heads)
            if kv_policy == "replicate"
            else range(query_heads[0] // query_per_kv, query_heads[-1] // query_per_kv + 1)
        )
    return ShardPlan(
        rank=rank,
        world_size=world_size,
        query_heads=query_heads,
        kv_heads=kv_heads,
        q_to_kv=tuple(head // query_per_kv - kv_heads.start for head in query_heads),
        intermediate=split_by_grain(config.intermediate_size, world_size, INTERMEDIATE_GRAIN)[rank],
        vocabulary=tuple(split_by_grain(config.vocabulary_size, world_size, VOCABULARY_GRAIN)),
    )


def split_evenly(count: int, parts: int) -> list[range]:
    """Consecutive ranges over `count`; the first ones are one longer."""
    size, longer = divmod(count, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def split_by_grain(size: int, parts: int, grain: int) -> list[range]:
    """Consecutive ranges whose borders are multiples of `grain`; the last gets the rest.

    The grain shrinks where the size is too small to give every part one.
    """
    if size < parts:
        raise ModelError(f"a dimension of {size} cannot be shared by {parts} chips")
    grain = min(grain, size // parts)
    ranges = [
        range(part.start * grain, part.stop * grain) for part in split_evenly(size // grain, parts)
    ]
    ranges[-1] = range(ranges[-1].start, size)
    return ranges
