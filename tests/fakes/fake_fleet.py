"""Worker processes under a virtual clock: they attach, form groups, run steps, beat, and die.

Messages of one worker keep their order in each direction and take a random time.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from control_plane.scheduling.messages import (
    Condemn,
    DropWorker,
    Effect,
    Event,
    FormGroup,
    Heartbeat,
    LossKind,
    PromptScores,
    RendezvousOpened,
    ResetWorker,
    RowResult,
    SendRendezvous,
    SendStep,
    StepDone,
    StepPlan,
    WorkerAttached,
    WorkerFaulted,
    WorkerInfo,
    WorkerLost,
    WorkerReady,
)
from tests.fakes.fake_chip import FakeChip


class VirtualClock:
    """Calls things at their time, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._order), call))

    def step(self) -> bool:
        """Makes the next call; False if there is none."""
        if not self._due:
            return False
        self.now, _, call = heapq.heappop(self._due)
        call()
        return True


class Ailment(Enum):
    """What is wrong with a chip."""

    CLOSED = "cannot be opened"
    FAILS = "fails while its group forms"
    HANGS = "hangs while its group forms"


@dataclass
class FakeProcess:
    """One worker process; a restarted one is another process of the same name."""

    worker_id: str
    incarnation: int
    alive: bool = True
    frozen: bool = False
    hung: bool = False
    epoch: int = 0
    form: FormGroup | None = None
    chip: FakeChip | None = None
    steps: dict[int, StepPlan] = field(default_factory=dict)
    sent_until: float = 0.0
    received_until: float = 0.0
    heard_rendezvous: bool = False

    @property
    def responds(self) -> bool:
        return self.alive and not self.frozen


@dataclass
class FleetShape:
    """Sizes and speeds of a fleet."""

    group_sizes: tuple[int, ...]
    blocks: dict[str, int]
    multiples: dict[str, int]
    block_tokens: int
    slots_count: int
    context_tokens: int
    delay_s: float = 0.001
    load_s: float = 0.05
    step_s: float = 0.01
    restart_s: float = 0.3
    hang_patience_s: float = 1.0
    """After its epoch ended, a process that hangs in it tells so and ends."""
    nonfinite_share: float = 0.0
    kv_windows: tuple[int, ...] = (0,)
    rows_max: dict[str, int] = field(default_factory=dict)
    ailments: dict[str, Ailment] = field(default_factory=dict)
    """Of chips that are broken; whoever removes one mends the chip."""


class FakeFleet:
    """All worker processes; `post` receives their events."""

    def __init__(
        self,
        clock: VirtualClock,
        random: Random,
        shape: FleetShape,
        post: Callable[[Event], None],
    ) -> None:
        self.clock = clock
        self.shape = shape
        self.gone_for_good: set[str] = set()
        self.processes: dict[str, FakeProcess] = {}
        self._random = random
        self._post = post
        self._incarnations = itertools.count(1)
        self._busy_until: dict[int, float] = {}

    # ------------------------------------------------------------ processes

    def start(self, worker_id: str) -> None:
        """A new process attaches, taking the name over from an old one if there is one."""
        if worker_id in self.gone_for_good:
            return
        old = self.processes.get(worker_id)
        if old:
            old.alive = False
        process = FakeProcess(worker_id, next(self._incarnations))
        self.processes[worker_id] = process
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=process.incarnation,
            pid=1000 + process.incarnation,
            backend="fake",
            device="fake",
            dtype="float32",
            model_digest="d",
            context_tokens=self.shape.context_tokens,
            vocabulary_size=1000,
            block_tokens_multiple=self.shape.multiples.get(worker_id, 1),
            rows_max=self.shape.rows_max.get(worker_id, 0),
            kv_windows=self.shape.kv_windows,
            unavailable_reason="closed" if self._has(worker_id, Ailment.CLOSED) else None,
        )
        self._send(process, WorkerAttached(info))
        if info.unavailable_reason is not None:
            self._end(process, LossKind.GOODBYE)
            return
        self._beat(process)

    def kill(self, worker_id: str, *, restart: bool = True) -> None:
        """The process ends; what it sent before still arrives, then the loss of its stream."""
        process = self.processes[worker_id]
        if not process.alive:
            return
        if not restart:
            self.gone_for_good.add(worker_id)
        self._end(process, LossKind.STREAM)

    def fault(self, worker_id: str, kind: LossKind) -> None:
        """The process reports a fault of its epoch and stays."""
        process = self.processes[worker_id]
        if process.responds and process.epoch:
            event = WorkerFaulted(worker_id, process.incarnation, process.epoch, kind, "fault")
            self._send(process, event)

    def die(self, worker_id: str) -> None:
        """The chip is lost for this process: it says so, whatever its epoch, and ends."""
        process = self.processes[worker_id]
        if process.responds:
            self._end_faulted(process, process.epoch, "chip lost")

    def freeze(self, worker_id: str) -> None:
        """The process does nothing more, heartbeats included, until it is killed."""
        self.processes[worker_id].frozen = True

    def _has(self, worker_id: str, ailment: Ailment) -> bool:
        return self.shape.ailments.get(worker_id) is ailment

    def _end(self, process: FakeProcess, kind: LossKind) -> None:
        """What the process sent before still arrives; its launcher starts another one."""
        lost = WorkerLost(process.worker_id, process.incarnation, kind, "ended")
        self._send(process, lost)
        process.alive = False
        self.clock.at(self.clock.now + self.shape.restart_s, lambda: self._restart(process))

    def _restart(self, process: FakeProcess) -> None:
        if self.processes[process.worker_id] is process:
            self.start(process.worker_id)

    def _beat(self, process: FakeProcess) -> None:
        if process.responds:
            self._send(process, Heartbeat(process.worker_id, process.incarnation))
            self.clock.at(self.clock.now + 0.5, lambda: self._beat(process))

    # ------------------------------------------------------------ messages

    def _send(self, process: FakeProcess, event: Event) -> None:
        if not process.responds:
            return
        when = self.clock.now + self._random.uniform(0.1, 1.0) * self.shape.delay_s
        process.sent_until = max(process.sent_until, when)
        self.clock.at(process.sent_until, lambda: self._post(event))

    def carry_out(self, effect: Effect) -> None:
        """Takes an effect for dispatch; it reaches the process later."""
        match effect:
            case SendStep():
                for worker_id in effect.worker_ids:
                    process = self.processes[worker_id]
                    self._receive(process, lambda p=process: self._got_step(p, effect))
            case FormGroup() | SendRendezvous() | ResetWorker() | DropWorker() | Condemn():
                process = self.processes[effect.worker_id]
                if process.incarnation == effect.incarnation:
                    self._receive(process, lambda: self._got(process, effect))
            case _:
                raise AssertionError(effect)

    def _receive(self, process: FakeProcess, call: Callable[[], None]) -> None:
        when = self.clock.now + self._random.uniform(0.1, 1.0) * self.shape.delay_s
        process.received_until = max(process.received_until, when)
        self.clock.at(process.received_until, call)

    def _got(self, process: FakeProcess, effect: Effect) -> None:
        match effect:
            case Condemn() | DropWorker():
                if process.alive:
                    process.alive = False
                    when = self.clock.now + self.shape.restart_s
                    self.clock.at(when, lambda: self._restart(process))
            case FormGroup() if process.responds:
                process.epoch, process.form, process.chip = effect.epoch, effect, None
                process.steps.clear()
                process.heard_rendezvous = effect.rank == 0
                if effect.rank == 0:
                    event = RendezvousOpened(
                        process.worker_id, process.incarnation, effect.epoch, b"here"
                    )
                    self._send(process, event)
                    self._load(process)
            case SendRendezvous() if process.responds and process.epoch == effect.epoch:
                assert effect.address == b"here"
                self._load(process)
            case ResetWorker() if process.epoch == effect.epoch:
                process.epoch, process.form, process.chip = 0, None, None
                if process.hung:
                    when = self.clock.now + self.shape.hang_patience_s
                    self.clock.at(when, lambda: self._end_hung(process, effect.epoch))

    def _load(self, process: FakeProcess) -> None:
        epoch = process.epoch
        load_s = self._random.uniform(0.2, 1.0) * self.shape.load_s
        self.clock.at(self.clock.now + load_s, lambda: self._loaded(process, epoch))

    def _loaded(self, process: FakeProcess, epoch: int) -> None:
        if not process.responds or process.epoch != epoch or process.form is None:
            return
        if process.hung or self._has(process.worker_id, Ailment.HANGS):
            process.hung = True
            return
        if self._has(process.worker_id, Ailment.FAILS):
            self.fault(process.worker_id, LossKind.DEVICE)
            return
        blocks_count = self.shape.blocks[process.worker_id]
        assert process.form.block_tokens % self.shape.block_tokens == 0
        form = process.form
        process.chip = FakeChip(blocks_count, form.block_tokens, form.slots, self.shape.kv_windows)
        self._send(
            process,
            WorkerReady(
                worker_id=process.worker_id,
                incarnation=process.incarnation,
                epoch=epoch,
                blocks=blocks_count,
                prefill_tokens_per_s=2000.0,
                decode_step_s=self.shape.step_s,
            ),
        )

    def _end_hung(self, process: FakeProcess, epoch: int) -> None:
        """The process ends itself, once, and says first that its chip is to blame."""
        if process.responds:
            self._end_faulted(process, epoch, "hung")

    def _end_faulted(self, process: FakeProcess, epoch: int, reason: str) -> None:
        event = WorkerFaulted(
            process.worker_id, process.incarnation, epoch, LossKind.DEVICE, reason, exiting=True
        )
        self._send(process, event)
        self._end(process, LossKind.GOODBYE)

    # ------------------------------------------------------------ steps

    def _got_step(self, process: FakeProcess, effect: SendStep) -> None:
        """A rank keeps a step; the last rank to get it lets the group begin."""
        plan = effect.plan
        if not process.responds or process.epoch != plan.epoch:
            return
        process.steps[plan.step_id] = plan
        ranks = [self.processes[worker_id] for worker_id in effect.worker_ids]
        if any(plan.step_id not in rank.steps or rank.epoch != plan.epoch for rank in ranks):
            return
        rows_s = 0.1 * self.shape.step_s * sum(row.tokens_count for row in plan.rows)
        step_s = self._random.uniform(0.7, 1.2) * (self.shape.step_s + rows_s)
        begin = max(self.clock.now, self._busy_until.get(plan.epoch, 0.0))
        self._busy_until[plan.epoch] = begin + step_s
        self.clock.at(begin + step_s, lambda: self._finish(ranks, plan))

    def _finish(self, ranks: list[FakeProcess], plan: StepPlan) -> None:
        if any(not rank.responds or rank.epoch != plan.epoch for rank in ranks):
            return
        answers: list[tuple[list[RowResult], list[PromptScores]]] = []
        for rank in ranks:
            assert rank.chip
            del rank.steps[plan.step_id]
            answers.append(rank.chip.execute(plan))
        assert all(answer == answers[0] for answer in answers), "ranks differ"
        results, scores = answers[0]
        for i in range(len(results)):
            if self._random.random() < self.shape.nonfinite_share:
                results[i] = RowResult((), finite=False)
        for i in range(len(scores)):
            if scores[i].logprobs and self._random.random() < self.shape.nonfinite_share:
                nan = (math.nan,) * len(scores[i].logprobs)
                scores[i] = PromptScores(nan, scores[i].tops)
        first = ranks[0]
        done = StepDone(
            worker_id=first.worker_id,
            incarnation=first.incarnation,
            group_id=plan.group_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            results=tuple(results),
            prompt_scores=tuple(scores),
        )
        self._send(first, done)
