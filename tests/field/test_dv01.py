"""DV01: lists of devices with gaps, names or a remapped visibility pick the wrong device, or crash.

Here the place in the list is the local index, which the chip table and the status show beside the
id; an id that does not exist, or comes twice, is refused by name before anything starts.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.end_to_end.cluster import ROOT, Cluster
from tests.end_to_end.generation import Client
from tests.fakes.field_models import FieldModel
from tests.field.field_cluster import ClusterSpec, FieldCluster, FieldClusters

pytestmark = pytest.mark.end_to_end

VISIBLE = "SIM_VISIBLE_DEVICES"
NAMED = ("--backend-option", "device-ids=0,left,2,right")
REFUSED_WITHIN_S = 60.0
SERVES_WITHIN_S = 240.0

GAPS = ClusterSpec(options=("--backend", "sim", "--devices", "0,1,2,5", "--groups", "1,1,1,1"))
NAMES = ClusterSpec(options=("--devices", "right,left", "--groups", "1,1", *NAMED))


def chips_of(cluster: FieldCluster) -> list[tuple[str, int, str]]:
    """Worker, local index and device of each chip: what the status says, as the table said."""
    table = cluster.cluster.output().split("description\n", 1)[1].split("\n\n", 1)[0]
    rows = [line.split() for line in table.splitlines()]
    printed = [(row[0], int(row[3]), row[4]) for row in rows]
    workers = cluster.status().workers
    told = [(worker.id, worker.chip_index, worker.device_id) for worker in workers]
    assert told == printed
    return told


def placed(ids: str) -> list[tuple[str, int, str]]:
    return [(f"chip{place}", place, each) for place, each in enumerate(ids.split(","))]


@pytest.fixture
def remapped(
    field_clusters: FieldClusters, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FieldCluster]:
    """Started where four of the eight chips may be seen, in another order."""
    field_clusters.close()
    monkeypatch.setenv(VISIBLE, "6,1,5,0")
    spec = ClusterSpec(options=("--backend", "sim", "--devices", "5,1", "--groups", "1,1"))
    with (
        Cluster(*field_clusters.options(spec)) as cluster,
        closing(Client(cluster.grpc)) as client,
        closing(FieldCluster(spec, cluster, client)) as running,
    ):
        client.wait_until_serving(SERVES_WITHIN_S)
        yield running


def test_the_place_in_the_list_is_the_local_index_whatever_is_visible(
    remapped: FieldCluster,
) -> None:
    assert chips_of(remapped) == placed("5,1")
    remapped.check_alive()


@pytest.mark.long
@pytest.mark.parametrize("field", [GAPS, NAMES], indirect=True, ids=["gaps", "names"])
def test_a_list_may_have_gaps_and_names(field: FieldCluster) -> None:
    assert chips_of(field) == placed(field.spec.options[field.spec.options.index("--devices") + 1])
    field.check_alive()


@pytest.mark.parametrize(
    ("options", "visible", "said"),
    [
        pytest.param(
            *(("--devices", "0,9"), None, "no device '9'; devices of sim: 0, 1, 2, 3, 4, 5, 6, 7"),
            marks=pytest.mark.long,
        ),
        (("--devices", "5,1,5"), None, "device '5' is listed twice"),
        (("--devices", "0,1"), "1,2", "no device '0'; devices of sim: 1, 2"),
    ],
    ids=str,
)
def test_a_bad_id_is_refused_by_name(
    field_clusters: FieldClusters, options: tuple[str, ...], visible: str | None, said: str
) -> None:
    command = [sys.executable, "-m", "scripts.cli.main", "serve", "--backend", "sim", *options]
    command += ["--model", str(field_clusters.path(FieldModel()))]
    environment = {**os.environ, **({} if visible is None else {VISIBLE: visible})}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=REFUSED_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
