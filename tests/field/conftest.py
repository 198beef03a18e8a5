"""Field scenarios: what broke for people who run such systems, tried on real processes.

One file a scenario, named after it. A scenario states what it runs on and takes `field`:

    pytestmark = pytest.mark.end_to_end
    CLUSTER = ClusterSpec(FieldModel(Chain(scripts=(("A", "b", "c"),))), ("--groups", "1,1"))

    @pytest.mark.parametrize("protocol", PROTOCOLS)
    def test_it(field: FieldCluster, counted: Callable[[int], int], protocol: str) -> None:
        answer = field.ask(protocol, "A", max_tokens=2)
        assert answer.text == "bc"

- A cluster is one `polychip serve` with the small settings of `field_cluster.SMALL`; options of the
  spec come after them and win. Tests with equal specs run one after the other on the same cluster,
  wherever they stand: a start takes seconds, so look into `shared_specs.py` first. Leave CLUSTER
  out for the default Mix. A test that needs several:
  `@pytest.mark.parametrize("field", [spec, other], indirect=True)`.
- Models: `tests/fakes/field_models.py`. Chain answers by script, Mix depends on every token.
- `field.ask(protocol, prompt, **parameters)` gives an Answer whatever the protocol, or raises
  Refused with gRPC's code. Below it: `field.http` (httpx), `field.stream` (raw events),
  `field.client` (gRPC stubs), `field.grpc_request`, `field.http_request`; `together` for threads.
- Shared checks: `field.oracle` with `check_equal`, `field.check_alive`, `field.check_idle`. IDLE is
  checked after every test that takes `field`, and the prefix cache is then empty for the next.
- `counted(1000)` is 1000 with --long and 100 without.
- A scenario that stops, kills or misconfigures a service starts its own:
  `field_clusters.close()`, then `with Cluster(*field_clusters.options(spec)) as cluster`.
"""

from collections.abc import Callable, Generator, Iterator

import pytest

from tests.end_to_end.cluster import Clusters, add_cluster_logs, shared_clusters
from tests.fakes.one_thread import one_thread as one_thread
from tests.field.field_cluster import ClusterSpec, FieldCluster, FieldClusters

ORDINARY_SHARE = 10


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """Clusters by their options; at most one serves."""
    yield shared_clusters()
    shared_clusters().close()


@pytest.fixture(scope="session")
def field_clusters(
    clusters: Clusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FieldClusters]:
    """Field clusters by their specs; at most one is alive."""
    running = FieldClusters(clusters, tmp_path_factory.mktemp("field"))
    yield running
    running.close()


@pytest.fixture
def field(request: pytest.FixtureRequest, field_clusters: FieldClusters) -> Iterator[FieldCluster]:
    """The cluster of the test's spec, idle before and after the test."""
    running = field_clusters.running(spec_of(request.node))
    yield running
    if running.cluster.alive():
        running.check_idle()


@pytest.fixture(scope="session")
def counted(long_run: bool) -> Callable[[int], int]:
    """How many of a full count the run does: all with --long, else a tenth, at least one."""
    return lambda full: full if long_run else max(1, full // ORDINARY_SHARE)


def spec_of(item: pytest.Item) -> ClusterSpec:
    """What the test runs on: its parameter, else its module's CLUSTER, else the default."""
    callspec = getattr(item, "callspec", None)
    chosen = callspec.params.get("field") if callspec is not None else None
    spec = chosen or getattr(getattr(item, "module", None), "CLUSTER", None) or ClusterSpec()
    assert isinstance(spec, ClusterSpec), f"{item.nodeid}: CLUSTER is no ClusterSpec"
    return spec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Brings scenarios on equal clusters together, and those that start their own behind them, so
    that they end no other's; tests of other folders keep their places."""
    positions = [index for index, item in enumerate(items) if takes(item, "field_clusters")]
    ordered = sorted((items[index] for index in positions), key=place)
    for index, item in zip(positions, ordered, strict=True):
        items[index] = item


def place(item: pytest.Item) -> tuple[bool, str]:
    """Where a scenario stands among the others."""
    return (False, repr(spec_of(item))) if takes(item, "field") else (True, "")


def takes(item: pytest.Item, fixture: str) -> bool:
    """A scenario of this folder that takes a fixture."""
    return fixture in getattr(item, "fixturenames", ()) and __file__.rpartition("/")[0] in str(
        item.path
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the cluster's logs to the report of a failed test."""
    report = yield
    add_cluster_logs(item, report)
    return report
