"""LB02: cache misses go to the group with the smallest tree though it is overloaded, and counts of
requests hide how much they are.

Here the unit of load is work: a miss goes where fewer tokens wait. Purely a matter of scheduling,
so it is the core alone under a virtual clock.
"""

from collections import Counter

from control_plane.config import SchedulingConfig
from control_plane.scheduling.messages import End
from tests.fakes.driven_core import DrivenCore

BLOCK_TOKENS = 4
BLOCKS = 600
CACHED_PREFIXES = 20
PREFIX_TOKENS = 40
QUEUE_REQUESTS = 6
QUEUE_TOKENS = 100
MISSES = 10
MISS_TOKENS = 40
LONG_TOKENS, SHORT_TOKENS, SHORTS = 400, 40, 10
WITHIN = 0.3
"""The groups' work differs by at most this part of the larger."""


class TwoGroups:
    """g0 and g1, each with a ledger of its own. Every prompt begins with a token of its own."""

    def __init__(self) -> None:
        config = SchedulingConfig(
            group_sizes=(1, 1), block_tokens=BLOCK_TOKENS, chunk_tokens=32, running_max=64
        )
        self.driven = DrivenCore(config, BLOCKS).serve(context_tokens=2000)
        self.count = 0

    def send(self, tokens_count: int, target: str | None = None, tokens_max: int = 2) -> str:
        """A prompt that no cache holds; the group it went to."""
        self.count += 1
        name = f"r{self.count}"
        before = self.queued_tokens()
        # The first block differs, so that nothing is shared.
        prompt = [self.count // 30 + 1, self.count % 30 + 1, *([0] * (tokens_count - 2))]
        self.driven.submit(name, prompt, max_tokens=tokens_max, target_group=target)
        after = self.queued_tokens()
        (group_id,) = [group for group in after if after[group] > before[group]]
        return group_id

    def queued_tokens(self) -> dict[str, int]:
        """Tokens still to be computed, by group."""
        loads = self.driven.core._serving.load.groups
        return {group_id: load.queued_tokens for group_id, load in loads.items()}

    def rest(self) -> None:
        """Everything is computed."""
        for group_id in ("g0", "g1"):
            self.driven.finish_all(group_id)

    def cached(self) -> dict[str, int]:
        snapshot = self.driven.core.snapshot(self.driven.now)
        return {group.group_id: group.blocks.cached for group in snapshot.groups}


def test_misses_go_to_the_idle_group_however_full_its_cache_is() -> None:
    groups = TwoGroups()
    for _ in range(CACHED_PREFIXES):
        groups.send(PREFIX_TOKENS, target="g1")
    groups.send(PREFIX_TOKENS, target="g0")
    groups.rest()
    cached = groups.cached()
    assert cached["g1"] > 10 * cached["g0"] > 0
    for _ in range(QUEUE_REQUESTS):
        groups.send(QUEUE_TOKENS, target="g0")
    shares = Counter(groups.send(MISS_TOKENS) for _ in range(MISSES))
    assert shares == {"g1": MISSES}


def test_one_long_prompt_weighs_as_much_as_many_short_ones() -> None:
    groups = TwoGroups()
    long_group = groups.send(LONG_TOKENS)
    short_groups = Counter(groups.send(SHORT_TOKENS) for _ in range(SHORTS))
    work = Counter({long_group: LONG_TOKENS})
    for group_id, count in short_groups.items():
        work[group_id] += count * SHORT_TOKENS
    assert work["g0"] > 0
    assert work["g1"] > 0
    assert abs(work["g0"] - work["g1"]) <= WITHIN * max(work.values()), work
    # Requests counted alone would have sent half of the short ones after the long one.
    assert short_groups[long_group] < SHORTS / 2


def test_the_work_is_forgotten_with_the_request() -> None:
    groups = TwoGroups()
    for index in range(SHORTS):
        groups.send(LONG_TOKENS if index % 3 == 0 else SHORT_TOKENS)
    assert min(groups.queued_tokens().values()) > 0
    groups.rest()
    for name in list(groups.driven.core._requests):
        groups.driven.handle(End(name, 2))
    assert groups.queued_tokens() == {"g0": 0, "g1": 0}
