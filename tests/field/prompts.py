"""Prompts as token ids for the scenarios, and what a service counts while it answers them."""

import random

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.field_tokenizers import SIZE, UNKNOWN
from tests.field.field_cluster import FieldCluster


def random_ids(seed: object, count: int) -> list[int]:
    """Ordinary tokens; equal seeds give equal beginnings. No other seed has the same."""
    generator = random.Random(repr(seed))
    return [generator.randrange(UNKNOWN + 1, SIZE) for _ in range(count)]


def metric_sum(field: FieldCluster, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    families = text_string_to_metric_families(field.http.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
