"""What GET /metrics says at one moment, and what must hold of it at any."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.field.field_cluster import FieldCluster

PREFIX = "polychip_"
TOTAL = "_total"
LEARNED = {"step_time_error"}
"""Gauges that stay when everybody has left."""


@dataclass(frozen=True)
class Scrape:
    """Values by name and labels, the prefix and `_total` left out of names.

    gauges: those of what there is now, and so not of what was learned of earlier steps.
    """

    values: Mapping[tuple[str, ...], float]
    gauges: Mapping[tuple[str, ...], float]

    def total(self, name: str, *labels: str) -> float:
        """The sum over all series of the name that have these labels first."""
        wanted = (name, *labels)
        return sum(value for key, value in self.values.items() if key[: len(wanted)] == wanted)

    @property
    def ended(self) -> float:
        """Requests that are over, however they ended."""
        return self.total("request_success") + self.total("request_failures")

    def check_reconciled(self) -> None:
        """Every request that came is over or open, and each has taken its time once."""
        open_count = self.total("num_requests_open")
        assert self.total("requests_received") == self.ended + open_count
        assert self.total("e2e_request_latency_seconds_count") == self.ended


def scrape(field: FieldCluster) -> Scrape:
    """One scrape."""
    return parsed(field.http.get("/metrics").raise_for_status().text)


def parsed(text: str) -> Scrape:
    """Prometheus' text format."""
    values: dict[tuple[str, ...], float] = {}
    gauges: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(PREFIX):
            found = {_key(sample): sample.value for sample in family.samples}
            values |= found
            if family.type == "gauge" and family.name.removeprefix(PREFIX) not in LEARNED:
                gauges |= found
    return Scrape(values, gauges)


def _key(sample: Any) -> tuple[str, ...]:
    name = sample.name.removeprefix(PREFIX).removesuffix(TOTAL)
    return (name, *sample.labels.values())
