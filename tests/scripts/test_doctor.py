"""`polychip doctor` over stand-in examinations: what it says, what it concludes, what hangs."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernels.spec import OPERATIONS
from scripts import examining
from scripts.cli import doctor as command
from scripts.cli.main import main
from scripts.conformance import Case, content_hash
from scripts.examining import Findings, examine_chips, examine_group

PROGRAM = """
import json, sys, time

task = json.loads(sys.argv[1])

def tell(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)

def probe(name, ok=True, detail=""):
    tell("begin", probe=name)
    if name in BEHAVIOUR:
        exec(BEHAVIOUR[name])
    tell("probe", probe=name, ok=ok, seconds=0.25, detail=detail)

BEHAVIOUR = __BEHAVIOUR__
exec(BEHAVIOUR.get("start", ""))
if task["task"] == "rank":
    tell("note", text="gloo serves: no compiler")
    probe(f"rank {task['rank']} sums")
else:
    tell("operation", operation="linear", dtype="float32", implementation="torch", ok=True,
         reason="the most preferred", rejected=[["mkl", "dtype float32 is not one of int8"]])
    for chip in task["chips"]:
        probe(f"chip {chip}", ok=f"chip {chip} fails" not in BEHAVIOUR, detail="8 GB free")
"""


@pytest.fixture
def examinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Child processes that behave as they are told, by the name of a step."""

    def behave(**behaviour: str) -> None:
        names = {name.replace("_", " "): code for name, code in behaviour.items()}
        path = tmp_path / "examination.py"
        path.write_text(PROGRAM.replace("__BEHAVIOUR__", repr(names)))
        monkeypatch.setattr(examining, "PROGRAM", (str(path),))

    behave()
    return behave


def run(*options: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, ["doctor", *options])


def report_of(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = run("--json", str(tmp_path / "report.json"), *options)
    complete = json.loads((tmp_path / "report.json").read_text())
    assert complete["sha256"] == content_hash(complete["report"])
    assert complete["sha256"] in result.output
    report = complete["report"]
    assert isinstance(report, dict)
    return result.exit_code, report


@pytest.mark.usefixtures("examinations")
def test_a_healthy_backend_is_status_0() -> None:
    result = run("--devices", "left,2", "--backend-option", "device-ids=0,1,2,left")
    assert result.exit_code == 0, result.output
    for part in ("left", "dtypes", "ok        0.25 s  chip 1  8 GB free", "rank 1 sums"):
        assert part in result.output
    assert "note: gloo serves: no compiler" in result.output
    assert "mkl: dtype float32 is not one of int8" in result.output


def test_a_chip_that_fails_is_status_1(examinations: Any, tmp_path: Path) -> None:
    examinations(chip_0_fails="")
    code, report = report_of(tmp_path)
    assert (code, report["outcome"]) == (1, "failed")
    assert [each["ok"] for each in report["probes"]] == [False, True, True]


def test_json_on_standard_output_stands_alone(examinations: Any) -> None:
    del examinations
    result = run("--json", "-")
    report = json.loads(result.stdout)["report"]
    assert report["backend"]["package"].startswith("polychip ")
    assert report["capabilities"]["unsupported"] == []
    assert {"polychip", "python", "torch", "backend API"} == set(report["versions"])
    assert "Probes" in result.stderr


TASK = {"backend": "cpu", "chips": [0, 1, 2]}


def probes_of(findings: Findings) -> list[tuple[str, bool]]:
    return [(probe.name, probe.ok) for probe in findings.probes]


def test_a_chip_that_hangs_costs_its_deadline_and_the_others_are_tried(examinations: Any) -> None:
    examinations(chip_1="time.sleep(60)")
    findings = Findings()
    examine_chips(TASK, 0.5, findings, lambda _: None)
    assert probes_of(findings) == [("chip 0", True), ("chip 1", False), ("chip 2", True)]
    assert findings.probes[1].detail == "no answer in 0.5 s; it was ended"
    assert len(findings.operations) == 1


def test_a_chip_that_takes_the_process_along_is_named_with_what_was_said(examinations: Any) -> None:
    examinations(chip_1="sys.exit('lost the bus')")
    findings = Findings()
    examine_chips(TASK, 5.0, findings, lambda _: None)
    assert probes_of(findings) == [("chip 0", True), ("chip 1", False), ("chip 2", True)]
    assert "status 1: lost the bus" in findings.probes[1].detail


def test_a_process_that_never_starts_is_one_failure(examinations: Any) -> None:
    examinations(start="sys.exit(7)")
    findings = Findings()
    examine_chips(TASK, 5.0, findings, lambda _: None)
    assert probes_of(findings) == [("the examination starts", False)]
    assert not findings.ok


def test_a_group_in_which_one_hangs_ends(examinations: Any) -> None:
    examinations(rank_1_sums="time.sleep(60)")
    findings = Findings()
    examine_group(TASK, 2, 0.3, findings, lambda _: None)
    assert probes_of(findings) == [("rank 0 sums", True), ("rank 1 sums", False)]


# ---------------------------------------------------------------- refusals and the suite


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--backend", "unheard-of"), "no backend 'unheard-of'"),
        (("--devices", "7"), "no device '7'"),
        (("--devices", "0,0"), "listed twice"),
        (("--devices", "cpu=0"), "write ids alone"),
        (("--backend-option", "x"), "neither NAME=VALUE"),
        (("--deadline", "0"), "--deadline"),
    ],
)
def test_what_does_not_fit_is_wrong_usage(options: tuple[str, ...], said: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.usefixtures("examinations")
@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_the_suites_failures_are_the_doctors(
    outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def suite(backend: str, options: Any, on_progress: Any, long: bool) -> list[Case]:
        asked.append((backend, options, long))
        operations = tuple(OPERATIONS)
        found = Case("test_x", "kernels", operations, "float32", outcome, "line one\nbroke", 0.1)
        on_progress(1, 1, found)
        return [found]

    monkeypatch.setattr(command, "run_suite", suite)
    text = tmp_path / "report.md"
    options = ("--conformance", "--report", str(text), "--backend-option", "kernels=auto", "--long")
    code, report = report_of(tmp_path, *options)
    assert asked == [("cpu", {"kernels": "auto"}, True)]
    assert code == (outcome == "failed")
    assert report["conformance"]["total"][outcome] == 1
    assert f"| linear | float32 | {int(outcome == 'passed')} |" in text.read_text()
