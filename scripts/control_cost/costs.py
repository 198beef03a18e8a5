"""Which costs are measured, in which order, and what they come to."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from control_plane.full_collections import rare_full_collections
from scripts.cancellable import run_cancellable
from scripts.control_cost.answer_streams import PROTOCOLS, StreamCost, measure_streams
from scripts.control_cost.frontend_routes import measure_routes
from scripts.control_cost.simulated_plane import APPLY, ENCODE, PLAN, SimulatedPlane
from scripts.control_cost.step_transport import measure_transport

TRANSPORT = "transport"
STAGES = (PLAN, ENCODE, TRANSPORT, APPLY)
"""Of a step, in order."""
BUDGET_S = 0.001
"""What a step of 64 rows may take of one core."""
TOKENS_AT_ONCE = (1, 8)
"""Of a stream: as they come, and coalesced."""
FRONTENDS = (1, 2, 4)
"""Processes that a step's tokens are sent to instead."""
ROUNDS_PER_STEP = 0.25
"""Rounds of streams for each step that is measured: a round has as many events as a step rows."""


@dataclass(frozen=True)
class Extent:
    """What is measured: steps of `rows` rows, `steps` of them, for every number of groups with
    every number of cached blocks."""

    groups: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: int
    steps: int
    seed: int

    @property
    def points(self) -> list[tuple[int, int]]:
        """(groups, cached blocks), in the order they are measured."""
        return [(groups, blocks) for groups in self.groups for blocks in self.blocks]


FULL = Extent((1, 10, 100), (1_000, 10_000, 100_000), rows=64, steps=400, seed=1)
QUICK = Extent((1, 4), (100, 1_000), rows=64, steps=20, seed=1)


@dataclass(frozen=True)
class Spread:
    """Of the steps that were measured, in seconds."""

    median_s: float
    p99_s: float

    @staticmethod
    def of(times_s: Sequence[float]) -> "Spread":
        """p99: the value whose place among the sorted ones is nearest to it."""
        ordered = sorted(times_s)
        return Spread(median(ordered), ordered[round(0.99 * (len(ordered) - 1))])


@dataclass(frozen=True)
class StepCost:
    """Of a step of one group while others serve, too; stages by name."""

    groups: int
    blocks: int
    stages: dict[str, Spread]

    @property
    def total_s(self) -> float:
        """The medians of all stages together."""
        return sum(spread.median_s for spread in self.stages.values())


@dataclass(frozen=True)
class RouteCost:
    """Of the tokens of a step on their way to so many frontends."""

    frontends: int
    step: Spread


@dataclass(frozen=True)
class Costs:
    """What was measured of an extent."""

    extent: Extent
    steps: list[StepCost] = field(default_factory=list)
    streams: list[StreamCost] = field(default_factory=list)
    routes: list[RouteCost] = field(default_factory=list)


class Watcher:
    """Hears what is measured next, and what came of it."""

    def on_next(self, what: str) -> None:
        """A part begins."""

    def on_done(self, what: str, taken_s: float) -> None:
        """A part is measured: a step, or a token, takes so long."""


def measure(extent: Extent, watcher: Watcher) -> Costs:
    """Measures everything. Raises PeerFailed, SimulationStuck."""
    costs = Costs(extent)
    for groups in extent.groups:
        serving = "1 group" if groups == 1 else f"{groups} groups"
        what = f"{serving}: sending and receiving"
        watcher.on_next(what)
        transport = run_cancellable(measure_transport(groups, extent.rows, extent.steps))
        watcher.on_done(what, median(transport))
        for blocks in extent.blocks:
            what = f"{serving}, {blocks} cached blocks"
            watcher.on_next(what)
            stages = _stages(extent, groups, blocks) | {TRANSPORT: Spread.of(transport)}
            costs.steps.append(StepCost(groups, blocks, {name: stages[name] for name in STAGES}))
            watcher.on_done(what, costs.steps[-1].total_s)
    rounds_count = max(1, round(extent.steps * ROUNDS_PER_STEP))
    for protocol in PROTOCOLS:
        for at_once in TOKENS_AT_ONCE:
            what = f"{extent.rows} {protocol} streams, {at_once} tokens at once"
            watcher.on_next(what)
            arguments = (protocol, extent.rows, at_once, rounds_count, extent.seed)
            cost = run_cancellable(measure_streams(*arguments))
            costs.streams.append(cost)
            watcher.on_done(what, cost.detokenize_s + cost.stream_s)
    for frontends in FRONTENDS:
        what = f"{extent.rows} tokens to frontends: {frontends}"
        watcher.on_next(what)
        times_s = run_cancellable(measure_routes(frontends, extent.rows, extent.steps))
        costs.routes.append(RouteCost(frontends, Spread.of(times_s)))
        watcher.on_done(what, costs.routes[-1].step.median_s)
    return costs


def _stages(extent: Extent, groups: int, blocks: int) -> dict[str, Spread]:
    plane = SimulatedPlane(groups, blocks, extent.rows, extent.steps, extent.seed, time.thread_time)
    with rare_full_collections():
        plane.run(extent.steps)
    return {name: Spread.of(times_s) for name, times_s in plane.samples.items()}
