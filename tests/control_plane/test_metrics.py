"""What a scrape tells: every name of docs/metrics.md, counts that add up, gauges of this moment."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from control_plane.errors import RequestCancelled, WorkerFailure
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    BlockCounts,
    GroupSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from control_plane.snapshot_metrics import SnapshotCollector

ROOT = Path(__file__).parents[2]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

FULL = Snapshot(
    workers=(
        WorkerSnapshot("chip0", 1, 1, "serving", "cores 0", "cpu", "g0", 0.1, blocks=64),
        WorkerSnapshot("chip1", 2, 1, "lost", "cores 1", "cpu", "g1", 9.0),
    ),
    groups=(
        GroupSnapshot(
            *("g0", 3, ("chip0",), "serving", 8, 5, 2, BlockCounts(4, 12, 48, 64), 16, 100, 2),
            predicted_s=7.5,
            chunk_step_error=0.2,
            decode_step_error=0.1,
        ),
        GroupSnapshot("g1", 1, ("chip1",), "waiting", 0, 0, 0, BlockCounts(0, 0, 0, 0), 16, 0, 0),
    ),
    requests=16,
    waiting=8,
    running=8,
    generated_tokens=99,
    failovers=6,
)
AT_REST = Snapshot(
    workers=FULL.workers,
    groups=(
        GroupSnapshot(
            "g0", 3, ("chip0",), "serving", 0, 0, 2, BlockCounts(40, 24, 0, 64), 16, 100, 0
        ),
    ),
    requests=0,
    waiting=0,
    running=0,
    generated_tokens=99,
    failovers=6,
)


class Watched:
    """Metrics of a core whose snapshot the test sets."""

    def __init__(self) -> None:
        self.core, self.open_count = FULL, 16
        self.metrics = Metrics()
        self.metrics.register(SnapshotCollector(lambda: self.core, lambda: self.open_count))
        self.metrics.describe(version="1.2", model_name="tiny", architecture="llama")

    def families(self) -> Iterable[Metric]:
        text, content_type = self.metrics.expose()
        assert content_type.startswith("text/plain")
        return text_string_to_metric_families(text.decode())

    def scrape(self) -> Series:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families()
            for sample in family.samples
        }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"polychip_{name}", frozenset(labels.items())


@pytest.fixture
def watched() -> Watched:
    return Watched()


def use_everything(metrics: Metrics) -> None:
    metrics.request_received("http")
    metrics.request_finished("stop", 1.0)
    metrics.queue_time(0.1)
    metrics.first_token(0.2)
    metrics.inter_token(0.03, 1)
    metrics.prompt_tokens(10, 4)
    metrics.generation_tokens(1)
    metrics.stage_time("submit", 0.001)
    metrics.step_done("g0", 0.02)


def test_the_docs_list_every_metric_with_type_and_labels(watched) -> None:
    use_everything(watched.metrics)
    known = {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(name for s in family.samples for name in s.labels) - {"le"},
        )
        for family in watched.families()
        if family.name.startswith("polychip_") and family.name != "polychip_build"
    }
    known.add(
        ("polychip_build_info", "gauge", frozenset({"version", "model_name", "architecture"}))
    )
    documented = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`polychip_"):
            labels = frozenset(cells[2].replace("`", "").replace(",", " ").split()) - {"none"}
            documented.add((cells[0].strip("`"), cells[1], labels))
    assert documented == known


def test_requests_received_are_those_finished_and_those_open(watched) -> None:
    metrics = watched.metrics
    for protocol in ("http", "grpc", "grpc", "http", "grpc"):
        metrics.request_received(protocol)
    for reason in ("stop", "length", RequestCancelled.reason, WorkerFailure.reason):
        metrics.request_finished(reason, 0.5)
    watched.open_count = 1
    series = watched.scrape()

    def total(name: str) -> float:
        return sum(value for (found, _), value in series.items() if found == f"polychip_{name}")

    assert total("requests_received_total") == 5
    ended = total("request_success_total") + total("request_failures_total")
    assert ended + total("num_requests_open") == 5
    assert series[key("request_failures_total", reason="CANCELLED")] == 1
    assert series[key("requests_received_total", protocol="grpc")] == 3
    assert series[key("e2e_request_latency_seconds_count")] == 4


def test_every_reason_is_there_from_the_start(watched) -> None:
    series = watched.scrape()
    assert series[key("request_success_total", finished_reason="length")] == 0
    for reason in ("CANCELLED", "QUEUE_FULL", "UNAVAILABLE", "INVALID_REQUEST"):
        assert series[key("request_failures_total", reason=reason)] == 0


def test_gauges_are_those_of_the_core_at_the_scrape(watched) -> None:
    before = watched.scrape()
    assert before[key("num_requests_running", group="g0")] == 8
    assert before[key("num_requests_waiting", group="g0")] == 5
    assert before[key("num_requests_held")] == 3
    assert before[key("kv_cache_usage_perc", group="g0")] == 0.75
    states = ("free", "cached", "referenced")
    kept = sum(before[key("kv_blocks", group="g0", state=state)] for state in states)
    assert kept == before[key("kv_blocks", group="g0", state="total")] == 64
    assert before[key("chip_kv_blocks", group="g0", worker="chip0")] == 64
    assert before[key("group_serving", group="g1")] == 0
    assert before[key("step_predicted_seconds_total", group="g0")] == 7.5
    assert before[key("step_time_error", group="g0", steps="chunk")] == 0.2
    assert before[key("step_time_error", group="g0", steps="decode")] == 0.1
    assert before[key("workers", state="serving")] == before[key("workers", state="lost")] == 1
    # Everybody cancelled, and no step has come since.
    watched.core, watched.open_count = AT_REST, 0
    after = watched.scrape()
    for name in ("num_requests_running", "num_requests_waiting", "steps_in_flight"):
        assert after[key(name, group="g0")] == 0
    assert after[key("num_requests_held")] == after[key("num_requests_open")] == 0
    assert after[key("kv_blocks", group="g0", state="referenced")] == 0
    assert after[key("num_preemptions_total", group="g0")] == 2


def test_tokens_that_came_together_share_the_time(watched) -> None:
    watched.metrics.inter_token(0.04, 1)
    watched.metrics.inter_token(0.12, 3)
    series = watched.scrape()
    name = "inter_token_latency_seconds"
    assert series[key(f"{name}_count")] == 4
    assert series[key(f"{name}_sum")] == pytest.approx(0.16)
    assert series[key(f"{name}_bucket", le="0.05")] == 4


def test_what_dispatch_counts_is_read_at_the_scrape(watched) -> None:
    watched.metrics.dispatch.streams_lost += 2
    watched.metrics.dispatch.step_bytes += 300
    series = watched.scrape()
    assert series[key("worker_streams_lost_total")] == 2
    assert series[key("step_bytes_total")] == 300


def test_two_services_in_one_process_count_apart(watched) -> None:
    watched.metrics.generation_tokens(5)
    assert Watched().scrape()[key("generation_tokens_total")] == 0


def test_the_process_is_measured_and_no_series_tells_when_it_began(watched) -> None:
    names = {name for name, _ in watched.scrape()}
    assert "process_resident_memory_bytes" in names
    assert not [name for name in names if name.endswith("_created")]
    assert any(
        name == "polychip_build_info" and ("model_name", "tiny") in labels
        for name, labels in watched.scrape()
    )


def test_a_step_of_64_rows_costs_less_than_a_millisecond(watched) -> None:
    def step() -> float:
        began = time.perf_counter()
        for _ in range(64):
            watched.metrics.inter_token(0.03, 1)
            watched.metrics.generation_tokens(1)
        for stage in ("step_done", "deliver", "dispatch"):
            watched.metrics.stage_time(stage, 0.001)
        watched.metrics.step_done("g0", 0.03)
        return time.perf_counter() - began

    # The least of many: what it costs, not what else the machine does.
    assert min(step() for _ in range(50)) < 0.001
