"""The clusters of the end-to-end tests, their order, and their logs where a test fails.

A start takes seconds, so tests on a service with equal options run one after the other, wherever
they stand. A test's options are those of `@pytest.mark.service(*options)`, else its module's
OPTIONS; tests that name none, or a bare `service`, start a service of their own and come last.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Clusters, add_cluster_logs, shared_clusters


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "service(*options): options of the service the test is on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Brings tests on equal services together; tests of other folders keep their places."""
    here = Path(__file__).parent
    positions = [index for index, item in enumerate(items) if item.path.parent == here]
    ordered = sorted((items[index] for index in positions), key=place)
    for index, item in zip(positions, ordered, strict=True):
        items[index] = item


def place(item: pytest.Item) -> tuple[bool, tuple[str, ...]]:
    """Where a test stands among the others."""
    marker = item.get_closest_marker("service")
    options = marker.args if marker else getattr(getattr(item, "module", None), "OPTIONS", ())
    return not options, options


@pytest.fixture(scope="session")
def clusters(backend_name: str) -> Iterator[Clusters]:
    """Clusters by their options; at most one serves."""
    del backend_name
    yield shared_clusters()
    shared_clusters().close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the cluster's logs to the report of a failed test."""
    report = yield
    add_cluster_logs(item, report)
    return report
