"""What all frontends counted of requests, as one: read when a scrape comes.

frontends --text of their own counts--> RequestSums --collect--> Metrics
"""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from control_plane.errors import ServiceUnavailable

RECEIVED = "polychip_requests_received_total"
SUCCEEDED = "polychip_request_success_total"
FAILED = "polychip_request_failures_total"

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels."""


class RequestSums(Collector):
    """Sums of counters and histograms over processes, those that ended among them.

    Requests that a process had not finished when it ended count as failed: their clients lost it.
    """

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._ended = _Sums()

    def report(self, name: str, text: bytes) -> None:
        """What a process counted since it began, in the place of what it said before."""
        self._texts[name] = text

    def retire(self, name: str) -> None:
        """The process ended; what it counted stays."""
        text = self._texts.pop(name, None)
        if text is None:
            return
        counted = _Sums()
        counted.add(text)
        lost = counted.total(RECEIVED) - counted.total(SUCCEEDED) - counted.total(FAILED)
        self._ended.add(text)
        self._ended.count(FAILED, {"reason": ServiceUnavailable.reason}, lost)

    @override
    def collect(self) -> Iterable[Metric]:
        sums = _Sums()
        for family in self._ended.families():
            sums.add_family(family)
        for text in self._texts.values():
            sums.add(text)
        return sums.families()


class _Sums:
    """Sums by family and, in it, by series; both in the order in which they came."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[Series, float]] = {}

    def add(self, text: bytes) -> None:
        """Adds what one process exposed."""
        for family in text_string_to_metric_families(text.decode()):
            self.add_family(family)

    def add_family(self, family: Metric) -> None:
        """Adds one family of one process."""
        self._families.setdefault(family.name, family)
        values = self._values.setdefault(family.name, {})
        for sample in family.samples:
            series = sample.name, tuple(sample.labels.items())
            values[series] = values.get(series, 0.0) + sample.value

    def count(self, name: str, labels: dict[str, str], value: float) -> None:
        """Adds to a series of a counter that is there."""
        values = self._values[name.removesuffix("_total")]
        values[name, tuple(labels.items())] += value

    def total(self, name: str) -> float:
        """Of a counter, over all labels."""
        return sum(self._values[name.removesuffix("_total")].values())

    def families(self) -> Iterable[Metric]:
        """The sums, ready to be exposed."""
        for name, family in self._families.items():
            summed = Metric(name, family.documentation, family.type)
            for (sample_name, labels), value in self._values[name].items():
                summed.add_sample(sample_name, dict(labels), value)
            yield summed
