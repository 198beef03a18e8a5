"""LB01: on one protocol's path load is never counted, so that all requests go to the first worker,
or a hot prefix to the one that has it.

Here load is counted where requests are dispatched, behind every protocol: cold requests are spread,
and a hot prefix goes to the idle group too when its owner is busy.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.fakes.field_models import FieldModel
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.scrape import scrape
from tests.field.shared_specs import PAIR

pytestmark = [pytest.mark.end_to_end, pytest.mark.quiet]

CLUSTER = replace(PAIR, model=FieldModel(context=1024, layers=256))
"""Deep, so that a step is mostly its worker's: else equal chips are as fast as what else runs on
their cores lets them be."""
AT_ONCE = 8
COLD_REQUESTS, COLD_TOKENS = 40, 12
COLD_SHARE_MIN, COLD_SHARE_MAX = 0.35, 0.65
COLD_TRIES = 3
"""A group whose core others use as well is slower, and rightly gets less."""
PROMPT_TOKENS = 48
HOT_REQUESTS, HOT_TOKENS = 200, 12
LOAD = ("num_requests_running", "num_requests_waiting", "num_requests_open", "steps_in_flight")


def cold_prompt(index: int) -> list[int]:
    """Shares no block with any other."""
    return [5 + index % 250, 5 + index // 250, *range(200, 200 + PROMPT_TOKENS - 2)]


def hot_prompt(index: int) -> list[int]:
    """Shares all but the last token with the others."""
    return [*range(100, 100 + PROMPT_TOKENS), 5 + index]


def ask_all(
    field: FieldCluster, protocol: str, prompts: Sequence[list[int]], tokens_count: int
) -> Counter[str]:
    """AT_ONCE at a time; how many each group answered."""

    def group_of(prompt: list[int]) -> str:
        return field.ask(protocol, prompt, max_tokens=tokens_count, ignore_eos=True).group

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return Counter(pool.map(group_of, prompts))


def check_load_released(field: FieldCluster) -> None:
    now = scrape(field)
    assert not any(now.total(name) for name in LOAD)
    assert not any(now.total("kv_blocks", group, "referenced") for group in ("g0", "g1"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cold_requests_are_spread(field: FieldCluster, protocol: str) -> None:
    tries = []
    for start in range(0, COLD_TRIES * COLD_REQUESTS, COLD_REQUESTS):
        prompts = [cold_prompt(start + index) for index in range(COLD_REQUESTS)]
        tries.append(ask_all(field, protocol, prompts, COLD_TOKENS))
        if COLD_SHARE_MIN <= tries[-1]["g0"] / COLD_REQUESTS <= COLD_SHARE_MAX:
            break
    else:
        raise AssertionError(f"never spread: {tries}")
    field.check_idle()
    check_load_released(field)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_hot_prefix_spills_over(
    field: FieldCluster, counted: Callable[[int], int], protocol: str
) -> None:
    owner = field.ask(protocol, hot_prompt(0), max_tokens=1).group
    # Alone it stays where its prefix is.
    warm = field.ask(protocol, hot_prompt(1), max_tokens=1)
    assert (warm.group, warm.cached_tokens) == (owner, PROMPT_TOKENS)
    shares = ask_all(
        field, protocol, list(map(hot_prompt, range(counted(HOT_REQUESTS)))), HOT_TOKENS
    )
    (other,) = {"g0", "g1"} - {owner}
    assert shares[other] > 0, f"{owner} had to do it all"
    field.check_idle()
    check_load_released(field)
