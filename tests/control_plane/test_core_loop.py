"""The loop around the core, driven with a scripted core."""

import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from control_plane.core_loop import CoreLoop
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    Accepted,
    Cancel,
    Condemn,
    FlushCache,
    Log,
    LogLevel,
    ResetWorker,
    ServingChanged,
    StepDone,
    Tick,
    WakeAt,
)

pytestmark = pytest.mark.anyio


class ScriptedCore:
    """Answers an event with the effects listed for its type, once each."""

    def __init__(self, **effects) -> None:
        self.effects = effects
        self.handled: list[object] = []

    def handle(self, event, now):
        self.handled.append(event)
        assert now <= time.monotonic()
        effects = self.effects.pop(type(event).__name__, [])
        if isinstance(effects, Exception):
            raise effects
        return effects

    def snapshot(self, now):
        raise NotImplementedError


class Routes:
    def __init__(self, core: ScriptedCore, clock=time.monotonic) -> None:
        self.taken: list[tuple[str, object]] = []
        self.failures = 0
        self.on_deliver = lambda _: None
        self.metrics = Metrics()
        self.loop = CoreLoop(
            core,
            clock,
            deliver=self._deliver,
            carry_out=lambda effect: self.taken.append(("workers", effect)),
            condemn=lambda effect: self.taken.append(("launchers", effect)),
            on_failure=self._fail,
            metrics=self.metrics,
        )

    def _deliver(self, effect) -> None:
        self.taken.append(("clients", effect))
        self.on_deliver(effect)

    def _fail(self) -> None:
        self.failures += 1


async def test_each_effect_goes_where_it_belongs_in_order():
    effects = [
        ResetWorker("chip0", 1, 1, "r"),
        Accepted("a", 5),
        Condemn("chip0", 1, 4711, "frozen"),
        ServingChanged(()),
    ]
    routes = Routes(ScriptedCore(Cancel=effects))
    routes.loop.post(Cancel("a"))
    assert routes.taken == list(
        zip(("workers", "clients", "launchers", "clients"), effects, strict=True)
    )


async def test_an_event_posted_by_an_effect_waits_for_the_effects_before_it():
    core = ScriptedCore(
        Cancel=[Accepted("a", 5), ServingChanged(())], FlushCache=[Accepted("b", 1)]
    )
    routes = Routes(core)

    def post_again(effect) -> None:
        if effect == Accepted("a", 5):
            routes.loop.post(FlushCache())
            assert core.handled == [Cancel("a")]

    routes.on_deliver = post_again
    routes.loop.post(Cancel("a"))
    assert core.handled == [Cancel("a"), FlushCache()]
    assert [effect for _, effect in routes.taken] == [
        Accepted("a", 5),
        ServingChanged(()),
        Accepted("b", 1),
    ]


async def test_a_log_effect_is_logged_at_its_level():
    effects = [Log("a.b", {"n": level.value}, level) for level in LogLevel]
    with capture_logs() as lines:
        Routes(ScriptedCore(Cancel=effects)).loop.post(Cancel("a"))
    assert [(line["event"], line["log_level"], line["n"]) for line in lines] == [
        ("a.b", level.value, level.value) for level in LogLevel
    ]


class Times:
    """A clock that each part moves on by what it takes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def sums(metrics: Metrics, name: str) -> dict[tuple[str, str], float]:
    """(label, _count or _sum) to value of a summary or histogram with one label."""
    return {
        (next(iter(sample.labels.values())), sample.name.removeprefix(name)): sample.value
        for family in text_string_to_metric_families(metrics.expose()[0].decode())
        for sample in family.samples
        if sample.name in (f"{name}_count", f"{name}_sum")
    }


async def test_stages_are_measured_apart():
    times = Times()

    class SlowCore(ScriptedCore):
        def handle(self, event, now):
            assert now == times.now
            times.now += {StepDone: 1.0, Cancel: 4.0}[type(event)]
            return self.effects.pop(type(event).__name__, [])

    done = StepDone("chip0", 1, "g3", 1, 1, (), device_s=0.5)
    effects = [Accepted("a", 1), ResetWorker("chip0", 1, 1, "r"), Accepted("b", 1)]
    routes = Routes(SlowCore(StepDone=effects), times)

    def take(_) -> None:
        times.now += 16.0
        if len(routes.taken) == 1:
            # What it leads to is a stage of its own, not part of the delivery.
            routes.loop.post(Cancel("a"))

    routes.on_deliver = take
    routes.loop.post(done)
    assert sums(routes.metrics, "polychip_scheduler_stage_seconds") == {
        ("step_done", "_count"): 1,
        ("step_done", "_sum"): 1.0,
        ("cancel", "_count"): 1,
        ("cancel", "_sum"): 4.0,
        ("deliver", "_count"): 2,
        ("deliver", "_sum"): 32.0,
        ("dispatch", "_count"): 1,
        ("dispatch", "_sum"): 0.0,
    }
    assert sums(routes.metrics, "polychip_step_device_seconds") == {
        ("g3", "_count"): 1,
        ("g3", "_sum"): 0.5,
    }


async def test_only_the_earliest_wake_up_counts():
    now = time.monotonic()
    core = ScriptedCore(Cancel=[WakeAt(now + 60), WakeAt(now + 0.02), WakeAt(now + 30)])
    Routes(core).loop.post(Cancel("a"))
    await asyncio.sleep(0.1)
    assert core.handled == [Cancel("a"), Tick()]


async def test_a_wake_up_can_be_asked_for_again_after_it_came():
    now = time.monotonic()
    core = ScriptedCore(Cancel=[WakeAt(now - 1)], Tick=[WakeAt(now)])
    Routes(core).loop.post(Cancel("a"))
    await asyncio.sleep(0.05)
    assert core.handled == [Cancel("a"), Tick(), Tick()]


async def test_a_closed_loop_wakes_no_more():
    core = ScriptedCore(Cancel=[WakeAt(time.monotonic() + 0.01)])
    routes = Routes(core)
    routes.loop.post(Cancel("a"))
    routes.loop.close()
    await asyncio.sleep(0.05)
    assert core.handled == [Cancel("a")]


async def test_a_core_that_raises_is_never_asked_again():
    core = ScriptedCore(Cancel=AssertionError("blocks are lost"))
    routes = Routes(core)
    with capture_logs() as lines:
        routes.loop.post(Cancel("a"))
    assert [(line["event"], line["event_kind"]) for line in lines] == [("core.failed", "Cancel")]
    assert routes.failures == 1
    routes.loop.post(FlushCache())
    assert core.handled == [Cancel("a")]
