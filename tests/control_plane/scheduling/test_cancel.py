"""Goal: a cancel has exactly one terminal effect in every state, and leaves nothing behind.

Method: seeded loads that fill memory and slots; each round waits until a request is in the state
that is its turn, cancels it there, and lets the rest finish.
"""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from control_plane.config import POLICIES, SchedulingConfig
from control_plane.errors import RequestCancelled
from control_plane.scheduling.live_request import LiveRequest, Stage
from control_plane.scheduling.messages import (
    Cancel,
    Effect,
    End,
    Failed,
    FlushCache,
    LossKind,
    Tokens,
    WorkerFaulted,
)
from tests.fakes.driven_core import DrivenCore, reference

ROUNDS_COUNT = 300
BLOCKS_COUNTS = {(0,): 14, (0, 6): 20, (0, 0, 9): 30, (5,): 10}
"""By the windows of the KV groups."""
STEPS_MAX = 400


def is_finishing(live: LiveRequest) -> bool:
    """Its last token is in a step on its way."""
    placement = live.placement
    if live.is_complete or not placement or live.stage is not Stage.RUNNING:
        return False
    return placement.planned_count >= live.computed_max


def is_prefilling(live: LiveRequest) -> bool:
    placement = live.placement
    return bool(placement and 0 < placement.planned_count < placement.admitted_count)


STATES: dict[str, Callable[[LiveRequest], bool]] = {
    "queued": lambda live: live.stage is Stage.WAITING and bool(live.group_id),
    "held": lambda live: live.stage is Stage.WAITING and not live.group_id,
    "prefilling": is_prefilling,
    "decoding": lambda live: live.stage is Stage.RUNNING and live.output_count > 0,
    "retracting": lambda live: live.stage is Stage.RETRACTING,
    "retracted": lambda live: live.stage is Stage.WAITING and live.retractions > 0,
    "finishing": is_finishing,
    "complete": lambda live: live.is_complete,
}


class Round:
    """One load and the cancel in the midst of it."""

    def __init__(self, seed: int, state: str) -> None:
        self.random = random = Random(seed)
        self.state = state
        config = SchedulingConfig(
            block_tokens=4,
            chunk_tokens=random.choice([8, 32]),
            running_max=random.choice([3, 8]),
            policy=random.choice(POLICIES),
            prefix_cache=random.random() < 0.8,
            plan_lead_s=1.0,  # Two steps on their way: a retraction finds rows in them.
            digest_interval_steps=1,
        )
        windows = random.choice([(0,), *BLOCKS_COUNTS])
        self.blocks_count = BLOCKS_COUNTS[windows]
        self.core = DrivenCore(config, self.blocks_count, kv_windows=windows).serve()
        self.forming: list[Effect] = []
        self.prompts: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        for i in range(random.randint(6, 9)):
            name, prompt = f"r{i}", [random.randrange(3) for _ in range(random.randint(1, 20))]
            self.prompts[name], self.lengths[name] = prompt, random.randint(8, 16)
            scored = random.random() < 0.3
            self.core.submit(
                name,
                prompt,
                max_tokens=self.lengths[name],
                priority=random.randint(-1, 1),
                prompt_top_tokens=1 if scored else None,
                use_prefix_cache=not scored,
            )

    def run(self) -> bool:
        """Cancels a request in the state and checks what follows; False if none got there."""
        name = self._reach_state()
        if name is not None:
            self._cancel(name)
        self.core.make_ready_all(self.forming)
        self.core._end_complete()  # Until then they keep what others wait for.
        self.core.finish_all()
        self._check_answers(name)
        self._check_at_rest()
        return name is not None

    def _reach_state(self) -> str | None:
        for _ in range(STEPS_MAX):
            there = [x for x in self.core.core._requests.values() if STATES[self.state](x)]
            if there and (self.state == "held" or self.random.random() < 0.5):
                return self.random.choice(there).request_id
            if not self.core.in_flight():
                return None
            if self.state == "held" and self.random.random() < 0.1:
                self._lose_group()
            else:
                self.core.finish_step()
            if self.state != "complete" or self.random.random() < 0.3:
                self.core._end_complete()
        return None

    def _lose_group(self) -> None:
        epoch = self.core.plans[-1].epoch
        self.forming = self.core.handle(WorkerFaulted("chip0", 1, epoch, LossKind.PEER, "lost"))

    def _cancel(self, name: str) -> None:
        effects = self.core.handle(Cancel(name))
        failed = [effect for effect in effects if isinstance(effect, Failed)]
        assert [effect.request_id for effect in failed] == [name]
        assert isinstance(failed[0].error, RequestCancelled)
        assert name not in self.core.core._requests
        for event in (Cancel(name), End(name, 3), Cancel("nobody")):
            effects = self.core.handle(event)
            assert not [e for e in effects if isinstance(e, Failed | Tokens)], event
        self.answered = list(self.core.outputs.get(name, []))
        self.scored = list(self.core.scores.get(name, []))

    def _check_answers(self, cancelled: str | None) -> None:
        assert set(self.core.errors) == ({cancelled} if cancelled else set())
        for name, prompt in self.prompts.items():
            if name == cancelled:
                assert self.core.outputs.get(name, []) == self.answered, "no token after it"
                assert self.core.scores.get(name, []) == self.scored, "no score after it"
            else:
                assert self.core.outputs[name] == reference(prompt, self.lengths[name])

    def _check_at_rest(self) -> None:
        snapshot = self.core.core.snapshot(self.core.now)
        assert snapshot.requests == snapshot.running == snapshot.waiting == 0
        (group,) = snapshot.groups
        assert group.blocks.free + group.blocks.cached == group.blocks.total
        assert len(self.core.core._serving.load) == 0
        if self.core.plans[-1].epoch == group.epoch:  # Else nothing was left to be computed.
            assert not self.core.last_chip().slots, "the workers' tables are empty"
        self.core.handle(FlushCache())
        (group,) = self.core.core.snapshot(self.core.now).groups
        assert group.blocks.free == self.blocks_count


def test_a_cancel_ends_a_request_once_in_every_state(only_seed) -> None:
    reached: Counter[str] = Counter()
    names = list(STATES)
    for seed in range(ROUNDS_COUNT) if only_seed is None else [only_seed]:
        state = names[seed % len(names)]
        try:
            reached[state] += Round(seed, state).run()
        except Exception as error:
            raise AssertionError(f"seed {seed} (repeat it with --seed {seed}): {error}") from error
    if only_seed is None:
        assert min(reached[state] for state in names) > ROUNDS_COUNT / len(names) / 3, reached


@pytest.mark.parametrize("steps_count", [0, 1, 2, 5, 20])
def test_cancelling_everyone_empties_the_books_before_any_step(steps_count) -> None:
    core = DrivenCore(SchedulingConfig(block_tokens=4, running_max=4, chunk_tokens=8), 48).serve()
    for i in range(12):
        core.submit(f"r{i}", [i, *range(20)], max_tokens=30)
    for _ in range(steps_count):
        core.finish_step()
    for i in range(12):
        core.handle(Cancel(f"r{i}"))
    snapshot = core.core.snapshot(core.now)
    assert snapshot.requests == snapshot.running == snapshot.waiting == 0
    assert snapshot.groups[0].blocks.referenced == 0
    (load,) = core.core._serving.load.groups.values()
    assert (load.requests_count, load.queued_tokens, load.queued_blocks) == (0, 0, 0)
    assert (load.running_count, load.available_blocks) == (0, 48)
    core.finish_all()
    core.submit("next", range(9), max_tokens=3)
    core.finish_all()
    assert core.outputs["next"] == reference(range(9), 3)
