"""A scheduling core driven by hand: one fake chip a worker, steps finish when the test says so."""

from collections import deque
from collections.abc import Callable

from control_plane.config import SchedulingConfig
from control_plane.request import Request, Sampling
from control_plane.scheduling.core import SchedulingCore
from control_plane.scheduling.messages import (
    Admission,
    Effect,
    End,
    Event,
    Failed,
    FormGroup,
    RowResult,
    SendStep,
    StepDone,
    StepPlan,
    Submit,
    Tick,
    Tokens,
    WakeAt,
    WorkerAttached,
    WorkerInfo,
    WorkerReady,
)
from tests.fakes.fake_chip import FakeChip, next_token


def worker_info(worker_id: str, incarnation: int = 1, **changes) -> WorkerInfo:
    values = {
        "pid": 7,
        "backend": "fake",
        "device": "fake",
        "dtype": "float32",
        "model_digest": "d",
        "context_tokens": 256,
        "vocabulary_size": 1000,
    }
    return WorkerInfo(worker_id=worker_id, incarnation=incarnation, **(values | changes))


def make_request(request_id: str, prompt_ids, **changes) -> Request:
    return Request(request_id, tuple(prompt_ids), Sampling(0.0, 1), **changes)


def reference(prompt_ids, count: int) -> list[int]:
    """The output of an undisturbed request."""
    context = list(prompt_ids)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt_ids) :]


class DrivenCore:
    """The core, what it said, and the chips that carry its steps out on demand."""

    def __init__(
        self,
        config: SchedulingConfig,
        blocks: int = 64,
        decode_step_s: float = 0.0,
        kv_windows: tuple[int, ...] = (0,),
    ):
        self.config = config
        self.core = SchedulingCore(config)
        self.now = 100.0
        self.blocks = blocks
        self.incarnation = 1
        self.decode_step_s = decode_step_s
        self.kv_windows = kv_windows
        self.effects: list[Effect] = []
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        """Of each prompt that is scored, from its second token on."""
        self.errors: dict[str, Exception] = {}
        self._wake_at: float | None = None
        self._answering: set[str] = set()
        self._chips: dict[int, FakeChip] = {}
        self._outstanding: dict[str, deque[SendStep]] = {}

    def handle(self, event: Event) -> list[Effect]:
        if isinstance(event, Tick):
            self._wake_at = None
        effects = self.core.handle(event, self.now)
        self.core.check_integrity()
        self.effects += effects
        for effect in effects:
            match effect:
                case SendStep():
                    self.plans.append(effect.plan)
                    group_id = effect.plan.group_id
                    self._outstanding.setdefault(group_id, deque()).append(effect)
                case Tokens():
                    for scored in effect.prompt_deltas:
                        scores = self.scores.setdefault(scored.request_id, [])
                        assert scored.first_index == len(scores) + 1
                        assert scored.request_id not in self._answering, "before the first token"
                        scores.extend(scored.scores.logprobs)
                    for delta in effect.deltas:
                        self._answering.add(delta.request_id)
                        outputs = self.outputs.setdefault(delta.request_id, [])
                        assert delta.first_index == len(outputs)
                        outputs.extend(delta.token_ids)
                case WakeAt():
                    self._wake_at = min(effect.when, self._wake_at or effect.when)
                case Failed():
                    self.errors[effect.request_id] = effect.error
                case _:
                    pass
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Time passes, with a tick whenever the core asked for one and one at the end."""
        until = self.now + seconds
        effects: list[Effect] = []
        while self._wake_at is not None and self._wake_at < until:
            self.now = max(self.now, self._wake_at)
            effects += self.handle(Tick())
        self.now = until
        return effects + self.handle(Tick())

    def attach(self, worker_id: str, incarnation: int = 1, **changes) -> list[FormGroup]:
        changes = {"kv_windows": self.kv_windows} | changes
        effects = self.handle(WorkerAttached(worker_info(worker_id, incarnation, **changes)))
        return [effect for effect in effects if isinstance(effect, FormGroup)]

    def make_ready(self, form: FormGroup) -> list[Effect]:
        self._outstanding.pop(form.group_id, None)
        self._chips[form.epoch] = FakeChip(self.blocks, form.block_tokens, 64, self.kv_windows)
        ready = WorkerReady(
            form.worker_id, form.incarnation, form.epoch, self.blocks, 1000.0, self.decode_step_s
        )
        return self.handle(ready)

    def make_ready_all(self, effects: list[Effect]) -> None:
        """Whoever is told in `effects` to join a group does so."""
        for effect in effects:
            if isinstance(effect, FormGroup):
                self.make_ready(effect)

    def serve(self, **changes) -> "DrivenCore":
        """All workers attach and get ready."""
        for index in range(sum(self.config.group_sizes)):
            for form in self.attach(f"chip{index}", **changes):
                self.make_ready(form)
        return self

    def submit(self, request_id: str, prompt_ids, **changes) -> list[Effect]:
        return self.handle(Submit(make_request(request_id, prompt_ids, **changes)))

    def in_flight(self, group_id: str = "g0") -> int:
        return len(self._outstanding.get(group_id, ()))

    def last_chip(self) -> FakeChip:
        """The chip that got the last step."""
        return self._chips[self.plans[-1].epoch]

    def last_admissions(self) -> tuple[str, list[Admission]]:
        """Group and admissions of the last step that had any."""
        plan = next(plan for plan in reversed(self.plans) if plan.admissions)
        return plan.group_id, list(plan.admissions)

    def finish_step(
        self,
        group_id: str = "g0",
        *,
        spoilt_slot: int | None = None,
        change: Callable[[StepDone], StepDone] = lambda done: done,
    ) -> list[Effect]:
        """The oldest step of a group ends; the row of `spoilt_slot` is not finite, and `change`
        makes of the result what it likes."""
        sent = self._outstanding[group_id].popleft()
        plan = sent.plan
        results, scores = self._chips[plan.epoch].execute(plan)
        for i, row in enumerate(row for row in plan.rows if row.sampled):
            if row.slot == spoilt_slot:
                results[i] = RowResult((), finite=False)
        self.now += 0.01
        done = StepDone(
            sent.worker_ids[0],
            self.incarnation,
            group_id,
            plan.epoch,
            plan.step_id,
            tuple(results),
            prompt_scores=tuple(scores),
        )
        return self.handle(change(done))

    def finish_all(self, group_id: str = "g0", steps_max: int = 2000) -> None:
        """Runs until nothing is on its way; complete answers are ended as intake does."""
        for _ in range(steps_max):
            if not self.in_flight(group_id):
                return
            self.finish_step(group_id)
            self._end_complete()
        raise AssertionError("does not come to rest")

    def _end_complete(self) -> None:
        for live in list(self.core._requests.values()):
            if live.is_complete:
                self.handle(End(live.request_id, live.tokens_max))
