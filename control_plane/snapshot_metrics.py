"""Metrics read from the scheduling core when a scrape comes: nothing to forget on any exit path.

GET /metrics --> Metrics --collect--> SnapshotCollector --> core's snapshot
"""

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from control_plane.scheduling.group_members import GroupState
from control_plane.scheduling.messages import GroupSnapshot, Snapshot, WorkerSnapshot
from control_plane.scheduling.worker_table import WorkerState


class SnapshotCollector(Collector):
    """snapshot: the core's present state. open_count: requests received and not finished."""

    def __init__(self, snapshot: Callable[[], Snapshot], open_count: Callable[[], int]) -> None:
        self._snapshot = snapshot
        self._open_count = open_count

    @override
    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        held = snapshot.waiting - sum(group.waiting for group in snapshot.groups)
        yield GaugeMetricFamily(
            "polychip_num_requests_open",
            "Requests received and not finished, those being read among them.",
            self._open_count(),
        )
        yield GaugeMetricFamily(
            "polychip_num_requests_held", "Choices that wait for any group to serve.", held
        )
        yield CounterMetricFamily(
            "polychip_failovers", "Choices moved on from a lost group.", snapshot.failovers
        )
        yield from _of_groups(snapshot.groups)
        yield from _of_workers(snapshot.workers)


def _of_groups(groups: tuple[GroupSnapshot, ...]) -> Iterable[Metric]:
    serving = GaugeMetricFamily(
        "polychip_group_serving", "1 if the group serves.", labels=["group"]
    )
    running = GaugeMetricFamily(
        "polychip_num_requests_running", "Choices that hold a slot.", labels=["group"]
    )
    waiting = GaugeMetricFamily(
        "polychip_num_requests_waiting", "Choices in the group's queue.", labels=["group"]
    )
    preempted = CounterMetricFamily(
        "polychip_num_preemptions",
        "Choices retracted for want of blocks; from 0 again when a group forms anew.",
        labels=["group"],
    )
    in_flight = GaugeMetricFamily(
        "polychip_steps_in_flight", "Steps sent whose result is awaited.", labels=["group"]
    )
    predicted = CounterMetricFamily(
        "polychip_step_predicted_seconds",
        "Time the steps done were expected to take; from 0 again when a group forms anew.",
        labels=["group"],
    )
    errors = GaugeMetricFamily(
        "polychip_step_time_error",
        "Usual distance of a step's time from the expected one lately, as a part of that.",
        labels=["group", "steps"],
    )
    usage = GaugeMetricFamily(
        "polychip_kv_cache_usage_perc", "Share of the blocks in use, 1 is all.", labels=["group"]
    )
    blocks = GaugeMetricFamily(
        "polychip_kv_blocks", "Blocks of KV memory by state.", labels=["group", "state"]
    )
    for group in groups:
        label = [group.group_id]
        serving.add_metric(label, group.state == GroupState.SERVING.value)
        running.add_metric(label, group.running)
        waiting.add_metric(label, group.waiting)
        preempted.add_metric(label, group.retracted)
        in_flight.add_metric(label, group.steps_in_flight)
        predicted.add_metric(label, group.predicted_s)
        errors.add_metric([*label, "chunk"], group.chunk_step_error)
        errors.add_metric([*label, "decode"], group.decode_step_error)
        usage.add_metric(label, group.blocks.referenced / max(1, group.blocks.total))
        for state in ("free", "cached", "referenced", "total"):
            blocks.add_metric([*label, state], getattr(group.blocks, state))
    return serving, running, waiting, preempted, in_flight, predicted, errors, usage, blocks


def _of_workers(workers: tuple[WorkerSnapshot, ...]) -> Iterable[Metric]:
    states = GaugeMetricFamily("polychip_workers", "Worker processes by state.", labels=["state"])
    counted = Counter(worker.state for worker in workers)
    for state in WorkerState:
        states.add_metric([state.value], counted[state.value])
    blocks = GaugeMetricFamily(
        "polychip_chip_kv_blocks",
        "Blocks of KV memory a chip has; a group uses as many as its smallest.",
        labels=["group", "worker"],
    )
    for worker in workers:
        blocks.add_metric([worker.group_id, worker.worker_id], worker.blocks)
    return states, blocks
