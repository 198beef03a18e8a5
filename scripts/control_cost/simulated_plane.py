"""A scheduling core with simulated groups: every row decodes, the results of steps are made up.

    Tick --> core --SendStep--> encoded; a step's time passes; result --decoded--> StepDone --> core
     plan                       encode                            apply

Time is simulated too: what is measured is what the core takes for an event, not when it comes.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from random import Random

from chip_worker import wire as worker_wire
from chip_worker.batch import RowResult, StepResult, StepTimes
from control_plane.config import SchedulingConfig
from control_plane.dispatch import wire
from control_plane.dispatch.wire import Place
from control_plane.request import Request, Sampling
from control_plane.scheduling.core import SchedulingCore
from control_plane.scheduling.messages import (
    Effect,
    End,
    Event,
    FormGroup,
    SendStep,
    StepPlan,
    Submit,
    Tick,
    Tokens,
    WakeAt,
    WorkerAttached,
    WorkerInfo,
    WorkerReady,
)

PLAN, ENCODE, APPLY = "plan", "encode", "apply"

STEP_S = 0.0217
"""Of every step. No multiple of the lead a step is planned with, so that no two groups that share
the time evenly are due at once."""
NEVER_S = 1e9
"""No heartbeat comes, and none is missed."""
TERM = 1
VOCABULARY_SIZE = 32_000
PROMPT_TOKENS = (64, 128)
"""Of a row that decodes, least and most: in every step some of the rows need another block."""
FILLING_BLOCKS = 64
"""Most of one prompt that fills the cache."""
PREFILL_TOKENS_PER_S = 1e9
"""Steps with prefill are as long as those without, and are expected to be."""
WARM_UP_STEPS = 40
SPARE_STEPS = 1000
"""Room for so many steps beyond those that are measured."""
EVENTS_MAX = 1_000_000
"""Until the simulation counts as stuck."""


class SimulationStuck(Exception):
    """The core does not do what a decoding service does: a mistake of ours."""


class SimulatedPlane:
    """`groups_count` groups of one chip, `rows_count` requests decoding on each, and in the prefix
    index `blocks_count` cached blocks that nobody holds, spread over the groups.

    clock: what is measured, such as processor time. samples: by stage, one for each step in which
    all rows of a group decoded and nothing else happened. steps_count: for how many of them in all
    there is room.
    """

    def __init__(
        self,
        groups_count: int,
        blocks_count: int,
        rows_count: int,
        steps_count: int,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self._clock = clock
        self._random = Random(seed)
        self._rows_count = rows_count
        self._groups_count = groups_count
        self._blocks_count = blocks_count
        self._output_tokens = steps_count // groups_count + SPARE_STEPS
        config = SchedulingConfig(
            group_sizes=(1,) * groups_count,
            running_max=rows_count,
            queue_requests_max=1 + groups_count * rows_count,
            queue_tokens_max=1 << 40,
            chunk_tokens=rows_count * PROMPT_TOKENS[1],
            heartbeat_timeout_s=NEVER_S,
            formation_heartbeat_timeout_s=NEVER_S,
        )
        self._block_tokens = config.block_tokens
        self._core = SchedulingCore(config)
        self._workers: dict[str, WorkerInfo] = {}
        self._now = 0.0
        self._wake_at = NEVER_S
        self._under_way: list[tuple[float, str, StepPlan]] = []
        self._ends_at: dict[str, float] = defaultdict(float)
        self._filling: dict[str, int] = {}
        self._serve()
        self._fill()
        self._decode()
        self.samples.clear()

    @property
    def _next_at(self) -> float:
        """When something happens next."""
        return min(self._wake_at, self._under_way[0][0] if self._under_way else NEVER_S)

    @property
    def _measured_count(self) -> int:
        return min(len(self.samples[stage]) for stage in (PLAN, APPLY))

    @property
    def cached_blocks(self) -> int:
        """That nobody holds, in all groups."""
        return sum(group.blocks.cached for group in self._core.snapshot(self._now).groups)

    def run(self, steps_count: int) -> None:
        """Goes on until so many steps, of all groups together, are measured."""
        self._advance_until(lambda: self._measured_count >= steps_count)

    def _advance(self) -> None:
        """Lets time pass until the next event and handles it."""
        if self._wake_at <= self._next_at:
            self._now, self._wake_at = self._wake_at, NEVER_S
            self._tick()
        else:
            self._now, _, plan = heapq.heappop(self._under_way)
            self._finish(plan)

    # ------------------------------------------------------------ events

    def _tick(self) -> None:
        started = self._clock()
        effects = self._core.handle(Tick(), self._now)
        taken = self._clock() - started
        plans = self._carry_out(effects)
        if len(plans) == 1 and self._only_decodes(plans[0]):
            self.samples[PLAN].append(taken)
            started = self._clock()
            wire.encode_step(plans[0], TERM)
            self.samples[ENCODE].append(self._clock() - started)

    def _finish(self, plan: StepPlan) -> None:
        """The result of a step comes in."""
        sampled_count = sum(row.sampled for row in plan.rows)
        ids = [self._random.randrange(VOCABULARY_SIZE) for _ in range(sampled_count)]
        rows = tuple(RowResult((token_id,), ()) for token_id in ids)
        times = StepTimes(plan.step_id, device_ns=round(STEP_S * 1e9))
        result = StepResult(TERM, plan.epoch, plan.step_id, rows, times)
        message = worker_wire.encode_report(result)
        worker = self._workers[plan.group_id]
        place = Place(plan.group_id, plan.epoch, 0)
        started = self._clock()
        event = wire.decode_report(message, worker, place)
        assert event is not None, "a result is an event"
        effects = self._core.handle(event, self._now)
        taken = self._clock() - started
        if not self._carry_out(effects) and self._only_decodes(plan):
            self.samples[APPLY].append(taken)

    def _post(self, event: Event) -> list[Effect]:
        """An event that is not measured."""
        effects = self._core.handle(event, self._now)
        self._carry_out(effects)
        return effects

    def _carry_out(self, effects: list[Effect]) -> list[StepPlan]:
        """Does what the effects say; returns the steps that were sent."""
        plans = []
        for effect in effects:
            match effect:
                case SendStep(plan=plan):
                    plans.append(plan)
                    ends_at = max(self._now, self._ends_at[plan.group_id]) + STEP_S
                    self._ends_at[plan.group_id] = ends_at
                    heapq.heappush(self._under_way, (ends_at, plan.group_id, plan))
                case WakeAt(when=when):
                    self._wake_at = min(self._wake_at, when)
                case Tokens(deltas=deltas) if self._filling:
                    for delta in deltas:
                        self._filling.pop(delta.request_id)
                        self._post(End(delta.request_id, 1))
                case _:
                    pass
        return plans

    def _only_decodes(self, plan: StepPlan) -> bool:
        whole = len(plan.rows) == self._rows_count
        return whole and not plan.admissions and all(row.sampled for row in plan.rows)

    # ------------------------------------------------------------ how it comes to that

    def _serve(self) -> None:
        """Every group gets its chip."""
        longest = PROMPT_TOKENS[1] + self._output_tokens + self._block_tokens
        row_blocks = -(-longest // self._block_tokens) + 1
        filling_blocks = self._rows_count * (FILLING_BLOCKS + 1)
        cached_blocks = -(-self._blocks_count // self._groups_count)
        blocks = cached_blocks + max(self._rows_count * row_blocks, filling_blocks)
        context_tokens = max(longest, (FILLING_BLOCKS + 2) * self._block_tokens)
        for index in range(self._groups_count):
            worker = WorkerInfo(
                worker_id=f"chip{index}",
                incarnation=1,
                pid=1,
                backend="simulated",
                device="simulated",
                dtype="float32",
                model_digest="",
                context_tokens=context_tokens,
                vocabulary_size=VOCABULARY_SIZE,
            )
            for form in self._post(WorkerAttached(worker)):
                if isinstance(form, FormGroup):
                    self._workers[form.group_id] = worker
                    ready = WorkerReady(
                        *(form.worker_id, form.incarnation, form.epoch),
                        *(blocks, PREFILL_TOKENS_PER_S, STEP_S),
                    )
                    self._post(ready)

    def _fill(self) -> None:
        """Prompts of one output token leave their blocks in the cache."""
        shares = [
            self._blocks_count * (index + 1) // self._groups_count
            - self._blocks_count * index // self._groups_count
            for index in range(self._groups_count)
        ]
        while any(shares):
            for group_id, index in zip(self._workers, range(len(shares)), strict=True):
                count = min(FILLING_BLOCKS, shares[index])
                if count:
                    shares[index] -= count
                    name = self._submit(group_id, count * self._block_tokens + 1, 1)
                    self._filling[name] = count
            self._advance_until(lambda: not self._filling)

    def _decode(self) -> None:
        """Fills every group's slots, group by group, so that their steps lie evenly in time."""
        self._advance_until(lambda: not self._under_way)
        for group_id in self._workers:
            for _ in range(self._rows_count):
                prompt_tokens = self._random.randint(*PROMPT_TOKENS)
                self._submit(group_id, prompt_tokens, self._output_tokens)
            self._wait_until(self._now + STEP_S / self._groups_count)
        self._advance_until(
            lambda: len(self.samples[APPLY]) >= max(WARM_UP_STEPS, 2 * self._groups_count)
        )

    def _submit(self, group_id: str, prompt_tokens: int, max_tokens: int) -> str:
        name = f"r{len(self._filling)}-{self._random.getrandbits(64):x}"
        ids = tuple(self._random.randrange(VOCABULARY_SIZE) for _ in range(prompt_tokens))
        self._post(
            Submit(
                Request(
                    name,
                    ids,
                    Sampling(0.0, 1),
                    max_tokens=max_tokens,
                    target_group=group_id,
                )
            )
        )
        return name

    def _wait_until(self, when: float) -> None:
        self._advance_until(lambda: self._next_at > when)
        self._now = when

    def _advance_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(EVENTS_MAX):
            if condition():
                return
            self._advance()
        raise SimulationStuck("the simulated groups do not come to decode")
