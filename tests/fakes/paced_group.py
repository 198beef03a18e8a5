"""A scheduling core and one chip under a virtual clock: each step takes as long as a test says."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

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
    ServingChanged,
    StepDone,
    StepPlan,
    Submit,
    Tick,
    Tokens,
    WakeAt,
    WorkerAttached,
    WorkerReady,
)
from control_plane.scheduling.step_time import StepWork, context_of_chunk
from tests.fakes.driven_core import make_request, worker_info
from tests.fakes.fake_fleet import VirtualClock

NETWORK_S = 0.0005
EVENTS_MAX = 200_000


@dataclass(frozen=True)
class PacedStep:
    """A step as the chip saw it; chunks: tokens of each slot's chunk."""

    work: StepWork
    chunks: dict[int, int]
    seconds: float


class PacedTables:
    """What a chip knows of its slots: enough to tell what a step computes."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        """Tokens computed, by slot."""
        self._known: dict[int, int] = {}
        """Tokens known before the first was drawn, by slot."""

    def apply(self, plan: StepPlan) -> tuple[StepWork, dict[int, int]]:
        """The work of a step, and the tokens of each slot's chunk."""
        for admission in plan.admissions:
            self._lengths[admission.slot] = admission.cached_count
            self._known[admission.slot] = len(admission.token_ids)
        for slot, token_ids in plan.extensions:
            self._known[slot] += len(token_ids)
        chunks: dict[int, int] = {}
        context = decode_rows = decode_context = 0
        for row in plan.rows:
            start = self._lengths[row.slot]
            self._lengths[row.slot] = start + row.tokens_count
            if start < self._known[row.slot]:
                chunks[row.slot] = row.tokens_count
                context += context_of_chunk(start, row.tokens_count)
            else:
                decode_rows += 1
                decode_context += start + 1
        return StepWork(sum(chunks.values()), context, decode_rows, decode_context), chunks


class PacedGroup:
    """step_s: seconds of a step, asked once for each in their order. Nothing is cached.

    steps: all that ended. token_times: when each request's tokens came back.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        step_s: Callable[[StepWork], float],
        *,
        decode_step_s: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
    ) -> None:
        self.steps: list[PacedStep] = []
        self.token_times: dict[str, list[float]] = {}
        self.clock = VirtualClock()
        self.core = SchedulingCore(config)
        self._step_s = step_s
        self._rates = (prefill_tokens_per_s, decode_step_s)
        self._tables = PacedTables()
        self._limits: dict[str, int] = {}
        self._busy_until = 0.0
        self._serves = False
        self._post(WorkerAttached(worker_info("chip0", context_tokens=16_384)))
        self._beat()
        self.run_until(lambda: self._serves)

    def submit(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        self._limits[name] = max_tokens
        self.token_times[name] = []
        request = make_request(
            name, range(prompt_tokens), max_tokens=max_tokens, use_prefix_cache=False
        )
        self._post(Submit(request))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        for _ in range(EVENTS_MAX):
            if is_over():
                return
            assert self.clock.step()
        raise AssertionError("does not get there")

    def has_first_token(self, *names: str) -> bool:
        return all(self.token_times[name] for name in names)

    def longest_gap_s(self, name: str) -> float:
        """Between two tokens of a request."""
        times = self.token_times[name]
        return max(later - earlier for earlier, later in pairwise(times))

    def _post(self, event: Event) -> None:
        for effect in self.core.handle(event, self.clock.now):
            self._carry_out(effect)

    def _later(self, when: float, event: Event) -> None:
        self.clock.at(when, lambda: self._post(event))

    def _beat(self) -> None:
        self._post(Heartbeat("chip0", 1))
        self.clock.at(self.clock.now + 0.5, self._beat)

    def _carry_out(self, effect: Effect) -> None:
        now = self.clock.now
        match effect:
            case FormGroup():
                ready = WorkerReady("chip0", 1, effect.epoch, 4096, *self._rates)
                self._later(now + NETWORK_S, ready)
            case ServingChanged():
                self._serves = True
            case WakeAt():
                self._later(effect.when, Tick())
            case SendStep():
                self.clock.at(now + NETWORK_S, lambda: self._run(effect.plan))
            case Tokens():
                for delta in effect.deltas:
                    times = self.token_times[delta.request_id]
                    times += [now] * len(delta.token_ids)
                    limit = self._limits[delta.request_id]
                    if len(times) == limit:
                        self._later(now, End(delta.request_id, limit))
            case Failed():
                raise AssertionError(effect)

    def _run(self, plan: StepPlan) -> None:
        """The chip begins the step once it is through with those before."""
        work, chunks = self._tables.apply(plan)
        step = PacedStep(work, chunks, self._step_s(work))
        end = max(self.clock.now, self._busy_until) + step.seconds
        self._busy_until = end
        results = tuple(RowResult((7,)) for row in plan.rows if row.sampled)
        done = StepDone("chip0", 1, plan.group_id, plan.epoch, plan.step_id, results, step.seconds)
        self.clock.at(end, lambda: self.steps.append(step))
        self._later(end + NETWORK_S, done)
