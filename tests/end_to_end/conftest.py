"""The clusters of the end-to-end tests, and their logs where a test fails."""

from collections.abc import Generator, Iterator

import pytest

from tests.end_to_end.cluster import Clusters, add_cluster_logs, shared_clusters


@pytest.fixture(scope="session")
def clusters(backend_name: str) -> Iterator[Clusters]:
    """Clusters by their options; at most one is alive."""
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
