"""A scheduling core and groups of one chip each under a virtual clock: steps take as long as the
chip of each says, and requests come when a test says."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from control_plane.config import SchedulingConfig
from control_plane.scheduling.core import SchedulingCore
from control_plane.scheduling.messages import (
    Effect,
    End,
    Event,
    Failed,
    FormGroup,
    Heartbeat,
    RowResult,
    SendStep,
    StepDone,
    StepPlan,
    Submit,
    Tick,
    Tokens,
    WakeAt,
    WorkerAttached,
    WorkerReady,
)
from control_plane.scheduling.step_time import StepWork
from tests.fakes.driven_core import make_request, worker_info
from tests.fakes.fake_fleet import VirtualClock
from tests.fakes.paced_group import EVENTS_MAX, NETWORK_S, PacedTables


@dataclass
class PacedChip:
    """step_s: seconds of a step, asked once for each. warm_up_rate: tokens of a prompt per second
    that its warm-up measures. A test may change it on the way."""

    step_s: Callable[[StepWork], float]
    warm_up_rate: float


@dataclass(frozen=True)
class Asked:
    """A request of a test: when, how many tokens of a prompt, how many of an answer."""

    when: float
    prompt_tokens: int
    answer_tokens: int


class PacedGroups:
    """Chip i is all of group gi. groups_of: where each request's answer came from, in order of
    requests."""

    def __init__(self, chips: Sequence[PacedChip], **settings) -> None:
        self.clock = VirtualClock()
        self.chips = chips
        self._core = SchedulingCore(SchedulingConfig(group_sizes=(1,) * len(chips), **settings))
        self._tables: dict[str, PacedTables] = {}
        self._busy_until: dict[str, float] = {}
        self._served: dict[str, str] = {}
        self._missing: dict[str, int] = {}
        self._requests_count = 0
        self._wake_at = math.inf
        for index in range(len(chips)):
            info = worker_info(f"chip{index}", context_tokens=16_384)
            self._post(WorkerAttached(info))
            self._beat(info.worker_id)
        self._run_until(lambda: all(g.state == "serving" for g in self._snapshot_groups()))

    def ask(self, asked: Iterable[Asked]) -> list[str]:
        """Which group answered each; returns when all are answered. Times count from now."""
        start = self.clock.now
        names = []
        for each in asked:
            name = f"r{self._requests_count}"
            # No two begin alike, so that nothing is cached of one for another.
            prompt_ids = [self._requests_count, *range(each.prompt_tokens - 1)]
            request = make_request(name, prompt_ids, max_tokens=each.answer_tokens)
            self._requests_count += 1
            self._missing[name] = each.answer_tokens
            self._later(start + each.when, Submit(request))
            names.append(name)
        self._run_until(lambda: not self._missing)
        return [self._served[name] for name in names]

    def shares(self, asked: Iterable[Asked]) -> Counter[str]:
        """How many each group answered."""
        return Counter(self.ask(asked))

    def _snapshot_groups(self):
        return self._core.snapshot(self.clock.now).groups

    def _run_until(self, is_over: Callable[[], bool]) -> None:
        for _ in range(EVENTS_MAX):
            if is_over():
                return
            assert self.clock.step()
        raise AssertionError("does not get there")

    def _post(self, event: Event) -> None:
        for effect in self._core.handle(event, self.clock.now):
            self._carry_out(effect)

    def _later(self, when: float, event: Event) -> None:
        self.clock.at(when, lambda: self._post(event))

    def _beat(self, worker_id: str) -> None:
        self._post(Heartbeat(worker_id, 1))
        self.clock.at(self.clock.now + 0.5, lambda: self._beat(worker_id))

    def _carry_out(self, effect: Effect) -> None:
        now = self.clock.now
        match effect:
            case FormGroup():
                self._tables[effect.group_id] = PacedTables()
                rate = self._chip(effect.group_id).warm_up_rate
                ready = WorkerReady(effect.worker_id, 1, effect.epoch, 4096, rate, 0.02)
                self._later(now + NETWORK_S, ready)
            case WakeAt():
                self._wake(effect.when)
            case SendStep():
                worker_id, plan = effect.worker_ids[0], effect.plan
                self.clock.at(now + NETWORK_S, lambda: self._run(worker_id, plan))
            case Tokens():
                for delta in effect.deltas:
                    self._served[delta.request_id] = delta.facts.group_id
                    self._missing[delta.request_id] -= len(delta.token_ids)
                    if not self._missing[delta.request_id]:
                        del self._missing[delta.request_id]
                        output_count = delta.first_index + len(delta.token_ids)
                        self._later(now, End(delta.request_id, output_count))
            case Failed():
                raise AssertionError(effect)

    def _wake(self, when: float) -> None:
        """Only the earliest one counts."""
        if when < self._wake_at:
            self._wake_at = when
            self.clock.at(when, lambda: self._tick(when))

    def _tick(self, when: float) -> None:
        if when == self._wake_at:
            self._wake_at = math.inf
            self._post(Tick())

    def _chip(self, group_id: str) -> PacedChip:
        return self.chips[int(group_id.removeprefix("g"))]

    def _run(self, worker_id: str, plan: StepPlan) -> None:
        """The chip begins the step once it is through with those before."""
        work, _ = self._tables[plan.group_id].apply(plan)
        seconds = self._chip(plan.group_id).step_s(work)
        end = max(self.clock.now, self._busy_until.get(plan.group_id, 0.0)) + seconds
        self._busy_until[plan.group_id] = end
        results = tuple(RowResult((7,)) for row in plan.rows if row.sampled)
        done = StepDone(worker_id, 1, plan.group_id, plan.epoch, plan.step_id, results, seconds)
        self._later(end + NETWORK_S, done)
