"""Who holds what: shards cover the model, heads find their keys, impossible groups are refused."""

from itertools import pairwise

import pytest

from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig, RopeConfig
from chip_worker.tensor_parallel import plan_shard, split_by_grain, split_evenly


def config(query_heads, kv_heads, intermediate=1536, vocabulary=49152):
    return ModelConfig(
        architecture="llama",
        layers_count=1,
        hidden_size=64,
        intermediate_size=intermediate,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=8,
        vocabulary_size=vocabulary,
        context_tokens=64,
        norm_epsilon=1e-5,
        rope=RopeConfig("default", 10000.0, 8),
        tied_embeddings=True,
    )


def plans(model, world_size, policy):
    return [plan_shard(model, rank, world_size, policy) for rank in range(world_size)]


def consecutive(ranges, size):
    return (
        ranges[0].start == 0
        and ranges[-1].stop == size
        and all(left.stop == right.start for left, right in pairwise(ranges))
    )


@pytest.mark.parametrize(
    ("heads", "chips", "sizes"),
    [
        (9, 2, [5, 4]),
        (9, 3, [3, 3, 3]),
        (32, 7, [5, 5, 5, 5, 4, 4, 4]),
        (6, 4, [2, 2, 1, 1]),
    ],
)
def test_query_heads_are_split_as_evenly_as_possible(heads, chips, sizes):
    assert [len(part) for part in split_evenly(heads, chips)] == sizes


@pytest.mark.parametrize("policy", ["cover", "replicate", "shard"])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(9, 3), (32, 8), (6, 2), (5, 1), (8, 8)])
def test_every_plan_covers_the_model_and_maps_heads_to_their_keys(policy, query_heads, kv_heads):
    model = config(query_heads, kv_heads)
    group = query_heads // kv_heads
    most = kv_heads if policy == "shard" else query_heads
    for world_size in range(1, most + 1):
        shards = plans(model, world_size, policy)
        assert consecutive([shard.query_heads for shard in shards], query_heads)
        assert consecutive([shard.intermediate for shard in shards], 1536)
        assert consecutive(list(shards[0].vocabulary), 49152)
        for shard in shards:
            assert len(shard.query_heads) > 0
            for local, head in enumerate(shard.query_heads):
                assert shard.kv_heads[shard.q_to_kv[local]] == head // group


def test_cover_keeps_only_the_heads_that_are_touched():
    shards = plans(config(9, 3), 2, "cover")
    assert [shard.kv_heads for shard in shards] == [range(2), range(1, 3)]
    assert [shard.q_to_kv for shard in shards] == [(0, 0, 0, 1, 1), (0, 1, 1, 1)]


def test_replicate_keeps_all_heads_everywhere():
    assert {plan.kv_heads for plan in plans(config(9, 3), 3, "replicate")} == {range(3)}


def test_shard_splits_whole_groups_and_gives_the_first_ranks_one_more():
    shards = plans(config(9, 3), 2, "shard")
    assert [shard.kv_heads for shard in shards] == [range(2), range(2, 3)]
    assert [shard.query_heads for shard in shards] == [range(6), range(6, 9)]


@pytest.mark.parametrize(
    ("policy", "chips", "allowed"), [("cover", 10, "1 to 9"), ("shard", 4, "1 to 3")]
)
def test_too_many_chips_are_refused_with_the_sizes_that_work(policy, chips, allowed):
    with pytest.raises(ModelError, match=allowed):
        plan_shard(config(9, 3), 0, chips, policy)


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ModelError, match=r"'mirror'.*cover"):
        plan_shard(config(9, 3), 0, 1, "mirror")


def test_grains_hold_and_the_last_part_gets_the_rest():
    parts = split_by_grain(1000, 3, 64)
    assert parts == [range(320), range(320, 640), range(640, 1000)]


def test_the_grain_shrinks_where_a_dimension_is_small():
    assert [len(part) for part in split_by_grain(70, 3, 64)] == [23, 23, 24]
