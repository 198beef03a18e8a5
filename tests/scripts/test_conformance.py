"""The conformance suite's runner: what it makes of cases, and the report it signs."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kernels.spec import OPERATIONS
from scripts import conformance
from scripts.conformance import (
    Case,
    SuiteUnavailable,
    check_suite,
    content_hash,
    follow,
    markdown,
    run_suite,
    signed,
    summary,
)

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest

@pytest.mark.covers("linear")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right(dtype):
    pass

@pytest.mark.covers("sample", dtype="float32")
def test_wrong():
    assert 1 + 1 == 3, "sums | wrongly"

@pytest.mark.covers("attention")
def test_left_out():
    pytest.skip("unsupported: the backend declares to have no attention")

def test_of_no_concern():
    pytest.skip("not applicable: nothing can be scripted")

def test_skipped_in_silence():
    pytest.skip("today it rains")

@pytest.fixture
def breaks_afterwards():
    yield
    raise RuntimeError("the chip does not close")

def test_broken_at_the_end(breaks_afterwards):
    pass
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--backend")
    parser.addoption("--backend-option", action="append")

def pytest_configure(config):
    config.addinivalue_line("markers", "covers(*operations, dtype=...): what it is a case of")
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small suite in the place of the real one, with a file that is particular to one backend."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_kernels.py").write_text(SUITE)
    (tmp_path / "test_cpu.py").write_text("def test_other():\n    raise ValueError\n")
    monkeypatch.setattr(conformance, "SUITE", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("suite")
def test_every_case_is_told_as_it_ends_with_what_it_is_a_case_of() -> None:
    told: list[tuple[int, int, str]] = []
    cases = run_suite("cpu", {"a": "b"}, lambda *each: told.append((*each[:2], each[2].id)))
    found = {case.id.partition("::")[2]: case for case in cases}
    outcomes = {name: case.outcome for name, case in found.items()}
    assert outcomes == {
        "test_right[float32]": "passed",
        "test_right[bfloat16]": "passed",
        "test_wrong": "failed",
        "test_left_out": "unsupported",
        "test_of_no_concern": "not applicable",
        "test_skipped_in_silence": "failed",
        "test_broken_at_the_end": "failed",
    }
    right = found["test_right[bfloat16]"]
    assert (right.area, right.operations, right.dtype) == ("kernels", ("linear",), "bfloat16")
    assert found["test_wrong"].dtype == "float32"
    assert "sums | wrongly" in found["test_wrong"].message
    assert "no reason a backend has: today it rains" in found["test_skipped_in_silence"].message
    assert "the chip does not close" in found["test_broken_at_the_end"].message
    assert [each[:2] for each in told] == [(number, 7) for number in range(1, 8)]


def test_a_suite_that_cannot_be_read_is_a_failure(suite: Path) -> None:
    (suite / "test_kernels.py").write_text("import nothing_of_that_name\n")
    cases = run_suite("cpu", {}, lambda *_: None)
    assert {case.outcome for case in cases} == {"failed"}
    assert "nothing_of_that_name" in cases[0].message


def test_what_is_missing_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SuiteUnavailable, match=r"tests/backends of Polychip's repository"):
        check_suite(tmp_path / "tests" / "backends")
    monkeypatch.setattr(conformance.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SuiteUnavailable, match="-m pip install 'pytest>=8'"):
        check_suite()


def test_records_are_read_as_they_are_written(tmp_path: Path) -> None:
    path, writing = tmp_path / "records", threading.Event()
    writing.set()

    def write() -> None:
        for text in ('{"a": 1}\n{"a"', ": 2}\n", '{"a": 3}\n'):
            with path.open("a") as file:
                file.write(text)
            time.sleep(0.05)
        writing.clear()

    writer = threading.Thread(target=write)
    writer.start()
    assert list(follow(path, writing.is_set)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    writer.join()
    assert list(follow(tmp_path / "never", lambda: False)) == []


# ---------------------------------------------------------------- the report


def case(outcome: str, *operations: str, dtype: str = "float32", message: str = "") -> Case:
    return Case(f"case-{outcome}", "kernels", operations, dtype, outcome, message, 0.5)


def test_cases_are_counted_by_operation_and_dtype() -> None:
    every = [case("passed", *OPERATIONS)]
    more = [case("failed", "linear", message="no"), case("passed", "linear", dtype="bfloat16")]
    found = summary([*every, *more, case("unsupported", "rotary", message="unsupported: x")], ())
    rows = {(each["operation"], each["dtype"]): each for each in found["operations"]}
    linear = rows["linear", "float32"]
    assert (linear["passed"], linear["failed"]) == (1, 1)
    assert rows["linear", "bfloat16"]["passed"] == 1
    assert rows["rotary", "float32"]["unsupported"] == 1
    assert found["unsupported"] == ["unsupported: x"]
    assert [each["message"] for each in found["failures"]] == ["no"]


def test_an_operation_without_a_case_is_a_failure_unless_it_is_declared() -> None:
    most = [case("passed", *[name for name in OPERATIONS if name != "rotary"])]
    assert [each["id"] for each in summary(most, ())["failures"]] == ["rotary"]
    assert summary(most, ["rotary"])["failures"] == []


REPORT: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "outcome": "failed",
    "versions": {"polychip": "1"},
    "host": {"name": "höst"},
    "backend": {"name": "cpu", "package": "polychip"},
    "devices": [{"index": 0, "id": "left", "memory": "1 GB", "description": "a|b"}],
    "capabilities": {"dtypes": ["float32"]},
    "probes": [{"name": "opens", "ok": True, "seconds": 0.1, "detail": ""}],
    "operations": [
        {"operation": "linear", "dtype": "float32", "implementation": "torch", "reason": "why"}
    ],
    "notes": ["gloo serves"],
}


def test_the_hash_is_of_the_content() -> None:
    report = REPORT | {"conformance": summary([case("failed", "linear", message="it broke")], ())}
    complete = signed(report)
    text = json.dumps(report, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert complete["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert content_hash(json.loads(json.dumps(complete))["report"]) == complete["sha256"]
    assert content_hash(report | {"outcome": "passed"}) != complete["sha256"]


def test_the_report_tells_people_all_of_it() -> None:
    report = REPORT | {"conformance": summary([case("failed", "linear", message="it broke")], ())}
    text = markdown(signed(report))
    for part in ("backend cpu: failed", "höst", "a\\|b", "gloo serves", "| linear | float32 |"):
        assert part in text
    assert "it broke" in text
    assert content_hash(report) in text


def test_the_suite_needs_no_torch_to_be_asked_for() -> None:
    code = "import sys, scripts.cli.doctor; print(sorted({'torch', 'pytest'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
