"""The conformance suite's side of pytest: every case as a line of JSON, as soon as it is done.

    pytest tests/backends --backend NAME -p scripts.conformance_plugin --case-records FILE

Only tests of the suite's own files run; those particular to one backend are left out.
"""

import json
from pathlib import Path

import pytest

AREAS = {
    "test_registry": "lifecycle",
    "test_device": "device",
    "test_memory_pool": "memory",
    "test_kernels": "kernels",
    "test_attention": "kernels",
    "test_sampling_kernels": "kernels",
    "test_communicator": "collectives",
    "test_fusion": "collectives",
    "test_checked": "collectives",
    "test_exhaustion": "exhaustion",
    "test_fault_drill": "fault drill",
}
"""What each file of the suite is about."""
SKIPS = ("unsupported", "not applicable", "long")
"""How the reason of a skipped test begins; any other skip is a failure."""
MESSAGE_CHARACTERS_MAX = 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that names the file of the records."""
    parser.addoption("--case-records", type=Path, help="file that receives a line for each case")


def pytest_configure(config: pytest.Config) -> None:
    """Starts recording."""
    path = config.getoption("--case-records")
    if path is not None:
        config.pluginmanager.register(CaseRecorder(path))


class CaseRecorder:
    """Writes what is selected, then each case when its last phase is over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, dict[str, object]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out other files' tests, and notes on each item what it is a case of."""
        chosen = [item for item in items if item.path.stem in AREAS]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        for item in items:
            item.user_properties.append(("case", _case_of(item)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tells how many cases there are."""
        self._write({"event": "selected", "cases": len(session.items)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed case."""
        if report.failed:
            case = {"id": report.nodeid, "area": "collection", "operations": [], "dtype": ""}
            message = report.longreprtext[-MESSAGE_CHARACTERS_MAX:]
            outcome = {"outcome": "failed", "message": message, "seconds": 0.0}
            self._write({"event": "case", **case, **outcome})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes a phase of a case; the teardown is the last."""
        found = self._outcomes.setdefault(
            report.nodeid, {"outcome": "passed", "message": "", "seconds": 0.0}
        )
        if report.when == "call":
            found["seconds"] = round(report.duration, 4)
        if report.failed or (report.skipped and found["outcome"] == "passed"):
            found |= _outcome_of(report)
        if report.when == "teardown":
            case = dict(report.user_properties)["case"]
            assert isinstance(case, dict)
            self._write({"event": "case", **case, **self._outcomes.pop(report.nodeid)})

    def _write(self, record: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _case_of(item: pytest.Item) -> dict[str, object]:
    """What a test is a case of; its marker's dtype goes before its parameter's."""
    markers = list(item.iter_markers("covers"))
    callspec = getattr(item, "callspec", None)
    parameter = "" if callspec is None else str(callspec.params.get("dtype", ""))
    dtypes = [str(marker.kwargs["dtype"]) for marker in markers if "dtype" in marker.kwargs]
    return {
        "id": item.nodeid.rpartition("/")[2],
        "area": AREAS[item.path.stem],
        "operations": [operation for marker in markers for operation in marker.args],
        "dtype": (dtypes or [parameter])[0].removeprefix("torch."),
    }


def _outcome_of(report: pytest.TestReport) -> dict[str, object]:
    if report.failed:
        return {"outcome": "failed", "message": report.longreprtext[-MESSAGE_CHARACTERS_MAX:]}
    longrepr = report.longrepr
    reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
    reason = reason.removeprefix("Skipped: ")
    outcome = next((skip for skip in SKIPS if reason.startswith(skip)), None)
    if outcome is None:
        return {"outcome": "failed", "message": f"left out for no reason a backend has: {reason}"}
    return {"outcome": outcome, "message": reason}
