"""What the control plane counts and measures, for Prometheus; docs/metrics.md lists every name.

intake, core_loop, dispatch --count--> Metrics --expose--> GET /metrics

Names follow vLLM's with the prefix polychip_. Gauges of the scheduling core are read when a scrape
comes (see snapshot_metrics), so that they are right whatever happened since the last step.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from control_plane.errors import REQUEST_ERRORS

SUCCESSES = ("stop", "length")
"""Reasons of a request that ended with its whole answer."""

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(slots=True)
class DispatchCounters:
    """What happened on the plane to the workers since the start."""

    streams_opened: int = 0
    streams_refused: int = 0
    """Attach calls that ended before Welcome."""
    streams_lost: int = 0
    """Streams that ended without Goodbye."""
    messages_stale: int = 0
    """Messages of another term or epoch, dropped."""
    messages_refused: int = 0
    """Messages that broke the protocol; each cost its stream."""
    steps_sent: int = 0
    step_bytes: int = 0
    """Bytes of steps, counted once a step, not once a rank."""
    steps_acknowledged: int = 0
    """Acknowledgements of ranks other than 0."""
    terms_raised: int = 0


DISPATCH_NAMES = {
    "streams_opened": ("worker_streams_opened", "Streams of workers that began."),
    "streams_refused": ("worker_streams_refused", "Streams of workers that were turned away."),
    "streams_lost": ("worker_streams_lost", "Streams of workers that ended without goodbye."),
    "messages_stale": ("worker_messages_stale", "Messages of an earlier formation, dropped."),
    "messages_refused": ("worker_messages_refused", "Messages that broke the protocol."),
    "steps_sent": ("steps_sent", "Steps sent to groups."),
    "step_bytes": ("step_bytes", "Bytes of these steps, one copy of each."),
    "steps_acknowledged": ("steps_acknowledged", "Steps done by chips other than a group's first."),
    "terms_raised": ("terms_raised", "Times this control plane outranked an earlier one."),
}


class Metrics:
    """Everything measured in one control plane, in a registry of its own.

    For the event loop's thread. A request here is one call of a client, whatever choices it has.
    dispatch: counted up by the dispatcher itself. requests: what is told of requests, if they are
    counted by other processes.
    """

    def __init__(self, requests: Collector | None = None) -> None:
        self.dispatch = DispatchCounters()
        self._registry = registry = _Registry()
        registry.register(_DispatchCollector(self.dispatch))
        ProcessCollector(registry=registry)
        self._build = Info(
            "polychip_build", "The program and the model it serves.", registry=registry
        )
        self._frontends = Gauge(
            "polychip_frontends", "Frontend processes that take requests.", registry=registry
        )
        self._frontends_lost = Counter(
            "polychip_frontends_lost", "Frontend processes that ended unasked.", registry=registry
        )
        self._step_times(registry)
        self._requests = _Registry()
        self._count_requests(self._requests)
        registry.register(requests or _Families(self._requests))

    def _count_requests(self, registry: CollectorRegistry) -> None:
        self._received = Counter(
            "polychip_requests_received", "Requests that came.", ["protocol"], registry=registry
        )
        success = Counter(
            "polychip_request_success",
            "Requests that ended with their whole answer.",
            ["finished_reason"],
            registry=registry,
        )
        # Every series exists from the start, so that a rate over the first failure is right.
        self._successes = {reason: success.labels(reason) for reason in SUCCESSES}
        self._failures = Counter(
            "polychip_request_failures",
            "Requests that ended with an error, cancelled ones among them.",
            ["reason"],
            registry=registry,
        )
        for kind in REQUEST_ERRORS:
            self._failures.labels(kind.reason)
        self._prompt_tokens = Counter(
            "polychip_prompt_tokens", "Prompt tokens, cached or not.", registry=registry
        )
        self._cached_tokens = Counter(
            "polychip_prompt_tokens_cached", "Prompt tokens found in the cache.", registry=registry
        )
        self._generation_tokens = Counter(
            "polychip_generation_tokens", "Tokens of answers.", registry=registry
        )
        self._request_times(registry)

    def _request_times(self, registry: CollectorRegistry) -> None:
        self._queue_time = Histogram(
            "polychip_request_queue_time_seconds",
            "Time from joining the queue to the first slot.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._first_token = Histogram(
            "polychip_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._inter_token = Histogram(
            "polychip_inter_token_latency_seconds",
            "Time between two tokens of an answer.",
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._duration = Histogram(
            "polychip_e2e_request_latency_seconds",
            "Time from a request's arrival to its end, failed ones among them.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )

    def _step_times(self, registry: CollectorRegistry) -> None:
        self._stages = Summary(
            "polychip_scheduler_stage_seconds",
            "Time the event loop spent on a stage.",
            ["stage"],
            registry=registry,
        )
        self._steps = Histogram(
            "polychip_step_device_seconds",
            "Time a group's chips worked on a step.",
            ["group"],
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._stage_series: dict[str, Summary] = {}
        self._step_series: dict[str, Histogram] = {}

    # ------------------------------------------------------------ intake

    def request_received(self, protocol: str) -> None:
        """A client's call arrived; exactly one `request_finished` follows."""
        self._received.labels(protocol).inc()

    def request_finished(self, reason: str, duration_s: float) -> None:
        """It is over. reason: of `SUCCESSES`, else the `reason` of its error."""
        success = self._successes.get(reason)
        (self._failures.labels(reason) if success is None else success).inc()
        self._duration.observe(duration_s)

    def queue_time(self, seconds: float) -> None:
        """A request left the queue after so long."""
        self._queue_time.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after the request."""
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the one before: each took an equal part of them."""
        if count == 1:
            self._inter_token.observe(seconds)
            return
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    def prompt_tokens(self, count: int, cached_count: int) -> None:
        """A prompt of `count` tokens was computed but for the `cached_count` found."""
        self._prompt_tokens.inc(count)
        self._cached_tokens.inc(cached_count)

    def generation_tokens(self, count: int) -> None:
        """So many tokens were delivered."""
        self._generation_tokens.inc(count)

    # ------------------------------------------------------------ core loop

    def stage_time(self, stage: str, seconds: float) -> None:
        """The event loop spent so long in a stage: an event's name, `deliver` or `dispatch`."""
        series = self._stage_series.get(stage)
        if series is None:
            series = self._stage_series[stage] = self._stages.labels(stage)
        series.observe(seconds)

    def step_done(self, group_id: str, device_s: float) -> None:
        """A group's chips worked so long on a step."""
        series = self._step_series.get(group_id)
        if series is None:
            series = self._step_series[group_id] = self._steps.labels(group_id)
        series.observe(device_s)

    # ------------------------------------------------------------ service

    def frontends_listening(self, count: int) -> None:
        """So many frontend processes take requests."""
        self._frontends.set(count)

    def frontend_lost(self) -> None:
        """A frontend process ended unasked."""
        self._frontends_lost.inc()

    def describe(self, **facts: str) -> None:
        """Sets the labels of polychip_build_info."""
        self._build.info(facts)

    def register(self, collector: Collector) -> None:
        """Adds metrics that are read when a scrape comes."""
        self._registry.register(collector)

    def expose(self) -> tuple[bytes, str]:
        """The answer to a scrape and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def requests_text(self) -> bytes:
        """What was counted here of requests, in Prometheus' text format."""
        return generate_latest(self._requests)


class _Registry(CollectorRegistry):
    """Without the time each series began, which would double the answer and tells nothing new."""

    @override
    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class _Families(Collector):
    """A registry as a part of another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    @override
    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


class _DispatchCollector(Collector):
    """Reads the plain counters of dispatch."""

    def __init__(self, counters: DispatchCounters) -> None:
        self._counters = counters

    @override
    def collect(self) -> Iterable[Metric]:
        for field, value in asdict(self._counters).items():
            name, meaning = DISPATCH_NAMES[field]
            yield CounterMetricFamily(f"polychip_{name}", meaning, value)
