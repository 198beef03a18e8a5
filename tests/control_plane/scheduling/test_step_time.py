"""The model of a step's time: what it learns from measured steps, and what it does not fall for."""

from dataclasses import replace
from random import Random

import pytest

from control_plane.config import SchedulingConfig
from control_plane.scheduling.step_time import (
    ERROR_MAX,
    StepTimeModel,
    StepWork,
    context_of_chunk,
)
from control_plane.scheduling.steps_in_flight import StepsInFlight
from tests.fakes.driven_core import DrivenCore

SEEDS = range(20)


class Machine:
    """Some machine: seconds of a step with its noise, the true ones in `expected`."""

    def __init__(self, seed: int, noise: float = 0.05) -> None:
        self.random = random = Random(seed)
        self.noise = noise
        self.speed = 1.0
        per_token = random.uniform(0.0001, 0.002)
        self.weights = (
            per_token,
            per_token / random.uniform(1000, 30_000),
            random.uniform(0.0001, 0.001),
            random.uniform(0.0, 1e-6),
        )
        self.base = random.uniform(0.003, 0.02)

    def expected(self, work: StepWork) -> float:
        parts = (weight * count for weight, count in zip(self.weights, work, strict=True))
        return (self.base + sum(parts)) / self.speed

    def measured(self, work: StepWork) -> float:
        return self.expected(work) * self.random.uniform(1 - self.noise, 1 + self.noise)

    def work(self) -> StepWork:
        """A step as it may come: with some rows, half of the time with a chunk."""
        random = self.random
        rows = random.randint(0, 30)
        tokens = random.choice([0, random.randint(1, 512)])
        context = context_of_chunk(random.randint(0, 4000), tokens)
        return StepWork(tokens, context, rows, rows * random.randint(10, 2000))


def learn(model: StepTimeModel, machine: Machine, steps_count: int) -> None:
    for _ in range(steps_count):
        work = machine.work()
        model.observe(work, machine.measured(work))


def worst_error(model: StepTimeModel, machine: Machine) -> float:
    works = [machine.work() for _ in range(100)]
    return max(abs(model.predict(work) / machine.expected(work) - 1) for work in works)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_learns_what_steps_cost(seed) -> None:
    machine, model = Machine(seed), StepTimeModel()
    assert not model.is_known
    learn(model, machine, 300)
    assert model.is_known
    assert worst_error(model, machine) < 0.35
    alone = StepWork(512, context_of_chunk(0, 512), 0, 0)
    assert model.predict(alone) == pytest.approx(machine.expected(alone), rel=0.2)
    assert model.prefill_tokens_per_s(512) == pytest.approx(512 / model.predict(alone))
    assert 0 < model.error(alone) < 0.2


def test_it_starts_from_the_warm_up() -> None:
    model = StepTimeModel(decode_step_s=0.02, prefill_tokens_per_s=1000)
    assert model.is_known
    assert model.predict(StepWork(0, 0, 1, 100)) == pytest.approx(0.02)
    assert model.predict(StepWork(100, 0, 1, 100)) == pytest.approx(0.12)
    assert model.predict(StepWork(100, 400_000, 1, 100)) > 0.18


def test_it_is_careful_until_steps_of_that_kind_were_measured() -> None:
    model = StepTimeModel(decode_step_s=0.01, prefill_tokens_per_s=1000)
    chunk, decode = StepWork(90, 0, 10, 0), StepWork(0, 0, 10, 0)
    for _ in range(30):
        model.observe(decode, 0.01)
    assert model.error(decode) < 0.01
    assert model.chunk_caution == pytest.approx(0.5)
    for _ in range(30):
        model.observe(chunk, 0.1)
    assert model.chunk_caution < 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_no_weight_is_ever_negative_whatever_is_measured(seed) -> None:
    random, model = Random(seed), StepTimeModel()
    machine = Machine(seed)
    for _ in range(300):
        model.observe(machine.work(), random.choice([0.0, 1e-9, random.random(), 1e6]))
        assert min(model._weights) >= 0
        assert 0 <= model.error(machine.work()) <= ERROR_MAX
        assert model.predict(machine.work()) < 1e9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_machine_that_stands_still_now_and_then_is_not_taken_for_slow(seed) -> None:
    machine, model = Machine(seed), StepTimeModel()
    learn(model, machine, 300)
    for _ in range(20):
        learn(model, machine, 20)
        work = machine.work()
        before = model.predict(work)
        model.observe(work, 100 * before)
        assert model.predict(work) < 1.6 * before
    learn(model, machine, 5)
    assert worst_error(model, machine) < 0.4


@pytest.mark.parametrize("speed", [0.4, 2.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_another_speed_is_learned_anew(seed, speed) -> None:
    machine, model = Machine(seed), StepTimeModel()
    learn(model, machine, 300)
    machine.speed = speed
    learn(model, machine, 150)
    assert worst_error(model, machine) < 0.3


@pytest.mark.parametrize("seed", SEEDS)
def test_much_decoding_does_not_wipe_out_what_a_chunk_costs(seed) -> None:
    machine, model = Machine(seed), StepTimeModel()
    learn(model, machine, 300)
    rows = StepWork(0, 0, 15, 15 * 300)
    for _ in range(1000):
        model.observe(rows, machine.measured(rows))
    chunk = StepWork(200, context_of_chunk(1000, 200), 15, 15 * 300)
    assert model.predict(chunk) == pytest.approx(machine.expected(chunk), rel=0.25)
    assert model.predict(rows) == pytest.approx(machine.expected(rows), rel=0.05)


def test_it_counts_the_steps_that_do_not_tell_rows_and_chunks_apart() -> None:
    model = StepTimeModel()
    for work in (StepWork(16, 0, 1, 1), StepWork(16, 0, 0, 0), StepWork(16, 0, 2, 2)):
        model.observe(work, 0.01)
    assert model.mixed_steps_count == 2
    model.observe(StepWork(0, 0, 1, 1), 0.01)
    assert model.mixed_steps_count == 0


def test_a_step_without_rows_teaches_nothing() -> None:
    model = StepTimeModel()
    steps = StepsInFlight(model)
    steps.add(1, [], 100.0)
    steps.take(100.0001, 0.0001)
    assert not model.is_known
    assert steps.predicted_s == 0


def test_what_the_chips_say_counts_not_when_it_arrives() -> None:
    core = DrivenCore(SchedulingConfig(block_tokens=4)).serve()
    model = core.core._serving.schedulers["g0"].step_time
    core.submit("a", range(4), max_tokens=40)
    for _ in range(30):
        core.finish_step(change=lambda done: replace(done, device_s=0.2))
    assert model.predict(StepWork(0, 0, 1, 34)) == pytest.approx(0.2, rel=0.01)
    (group,) = core.core.snapshot(core.now).groups
    assert 0.7 * 30 * 0.2 < group.predicted_s < 30 * 0.2
    assert 0 <= group.decode_step_error < 0.05 < group.chunk_step_error


def test_it_remembers_how_large_a_chunk_was_tried_lately() -> None:
    model = StepTimeModel()
    for tokens in (16, 200, 20):
        model.observe(StepWork(tokens, 0, 1, 1), 0.01)
    assert 190 < model.chunk_tokens_tried < 200
    for _ in range(200):
        model.observe(StepWork(20, 0, 1, 1), 0.01)
    assert model.chunk_tokens_tried == 20
