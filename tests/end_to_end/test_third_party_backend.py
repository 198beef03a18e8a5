"""A backend in a package of its own, found by its entry point, serves golden answers.

It overrides five methods; everything else is the default: reference operations, paged memory,
collectives over TCP.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.interface import BackendRuntime, Device
from backends.plugin import Backend
from tests.end_to_end.cluster import ROOT, START_DEADLINE_S, Cluster
from tests.end_to_end.generation import Client, request_of
from tests.golden.cases import golden_cases

PACKAGE = ROOT / "tests/third_party/abacus"
OVERRIDES_MAX = 5
CASES = 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the package; nothing is asked of any index."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "abacus"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*command, str(source)], check=True, timeout=120)
    return target


@pytest.mark.end_to_end
def test_it_overrides_no_more_than_five_methods() -> None:
    known = {name for kind in (Backend, BackendRuntime, Device) for name in vars(kind)}
    namespace = "\n".join(
        path.read_text() for path in sorted((PACKAGE / "polychip_abacus").glob("*.py"))
    )
    methods = [
        line.split("def ")[1].split("(")[0] for line in namespace.splitlines() if "    def " in line
    ]
    assert set(methods) <= known
    assert 0 < len(methods) <= OVERRIDES_MAX


@pytest.mark.end_to_end
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_it_serves_golden_answers(
    installed: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    cases = sorted(golden_cases(), key=lambda case: len(case.prompt_ids) + len(case.output_ids))
    with Cluster("--backend", "abacus", "--groups", str(size), "--dtype", "float32") as cluster:
        client = Client(cluster.grpc)
        client.wait_until_serving(START_DEADLINE_S)
        assert {worker.backend for worker in client.status().workers} == {"abacus"}
        for case in cases[:CASES]:
            answer = client.generate(request_of(case.prompt_ids, len(case.output_ids)))
            assert tuple(answer.ids) == case.output_ids, case.name
