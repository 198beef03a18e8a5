"""PC02: the prefix a request matched is evicted while the request uses it.

Here match and pin are one act at admission: what waits holds nothing and loses nothing but time.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.field.field_cluster import PROTOCOLS, FieldCluster, check_equal, together
from tests.field.prompts import random_ids
from tests.field.shared_specs import SCARCE

pytestmark = pytest.mark.end_to_end

CLUSTER = SCARCE
PREFIX_TOKENS = 48
"""Three blocks: the index has a node that ends exactly here."""


@pytest.mark.parametrize("extra", [1, 0])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prefix_in_use_survives_eviction(field: FieldCluster, protocol: str, extra: int) -> None:
    """extra: tokens of the prompt beyond the node; none is a full hit, which gives up a block."""
    prefix = random_ids(("pc02", protocol, extra), PREFIX_TOKENS)
    prompt = prefix + random_ids("pc02 extra", extra)
    expected = field.oracle(prompt, 150)
    for index in range(5):
        field.ask("grpc", random_ids(("pc02 filler", protocol, extra, index), 64), max_tokens=2)
    field.ask(protocol, prefix, max_tokens=1)
    blocks = field.status().groups[0].blocks
    assert (blocks.cached, blocks.free) == (5 * 4 + 3, 1), "all that is asked now must evict"
    evicting = 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(field.ask, protocol, prompt, max_tokens=150, ignore_eos=True)
        while not running.done():
            evicting += 1
            field.ask("grpc", random_ids(("pc02 other", protocol, evicting), 64), max_tokens=2)
        answer = running.result()
    assert evicting, "nobody else asked"
    check_equal(answer, expected)
    assert answer.cached_tokens == (PREFIX_TOKENS if extra else PREFIX_TOKENS - 16)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prefix_may_go_while_its_request_waits(field: FieldCluster, protocol: str) -> None:
    """Eight take all slots and, as they grow, all blocks; two with a cached prefix wait."""
    prefix = random_ids(("pc02 waits", protocol), PREFIX_TOKENS)
    prompts = [prefix, [*prefix, 17]]
    expected = [field.oracle(prompt, 20) for prompt in prompts]
    field.ask(protocol, prefix, max_tokens=1)
    crowd = [random_ids(("pc02 crowd", index), 14) for index in range(8)]
    retracted = field.status().groups[0].retracted
    answers = together(
        *(partial(field.ask, "grpc", prompt, max_tokens=60, ignore_eos=True) for prompt in crowd),
        *(partial(field.ask, protocol, each, max_tokens=20, ignore_eos=True) for each in prompts),
    )
    for answer, one in zip(answers[-2:], expected, strict=True):
        check_equal(answer, one)
        assert answer.cached_tokens in (0, 16, 32, 48)
    assert field.status().groups[0].retracted > retracted, "memory sufficed for all"
    for prompt, answer in zip(crowd, answers, strict=False):
        check_equal(answer, field.oracle(prompt, 60))
