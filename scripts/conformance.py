"""Runs the conformance suite on a backend in a child process and makes the report of it.

pytest --a line a case--> file --follow--> Case records --summary--> report, signed by its SHA-256
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.spec import OPERATIONS

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "tests" / "backends"
POLL_S = 0.2
OUTCOMES = ("passed", "failed", "unsupported", "not applicable", "long")
OUTPUT_CHARACTERS_MAX = 4000


class SuiteUnavailable(Exception):
    """The suite cannot be run here; the message says what is missing and where it comes from."""


@dataclass(frozen=True)
class Case:
    """One test with what it is a case of; message: of a failure, or why it was left out."""

    id: str
    area: str
    operations: tuple[str, ...]
    dtype: str
    outcome: str
    message: str
    seconds: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Case":
        """From the plugin's record."""
        names = cls.__dataclass_fields__
        values = {name: record[name] for name in names} | {
            "operations": tuple(record["operations"])
        }
        return cls(**values)


def check_suite(suite: Path = SUITE) -> None:
    """Raises SuiteUnavailable naming what to install, or where the tests are."""
    if not (suite / "conftest.py").is_file():
        raise SuiteUnavailable(
            f"the conformance suite is not at {suite}: it is the folder tests/backends of "
            "Polychip's repository; install Polychip from a checkout with scripts/setup"
        )
    if importlib.util.find_spec("pytest") is None:
        raise SuiteUnavailable(
            "the conformance suite needs pytest, which is not installed; install it with: "
            f"{sys.executable} -m pip install 'pytest>=8'"
        )


def run_suite(
    backend: str,
    options: Mapping[str, str],
    on_progress: Callable[[int, int, Case], None],
    long: bool = False,
) -> list[Case]:
    """Every case of the suite on a backend; `on_progress` hears of each: how many, of how many.

    Raises SuiteUnavailable. A suite that cannot be collected, or dies, is a failed case.
    """
    check_suite()
    with tempfile.TemporaryDirectory(prefix="polychip-conformance-") as folder:
        records, output = Path(folder) / "records", Path(folder) / "output"
        command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "-p", "no:cacheprovider"]
        command += ["-p", "scripts.conformance_plugin", "--case-records", str(records)]
        command += ["--backend", backend, *(["--long"] if long else [])]
        command += [f"--backend-option={name}={value}" for name, value in options.items()]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            cases = _collected(follow(records, lambda: process.poll() is None), on_progress)
        finally:
            process.kill()
            code = process.wait()
        if code not in (0, 1) or not cases:
            said = output.read_text(errors="replace")[-OUTPUT_CHARACTERS_MAX:]
            message = f"the suite ended with status {code}: {said}"
            cases.append(Case("the suite", "collection", (), "", "failed", message, 0.0))
        return cases


def follow(path: Path, alive: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The records of a file as they are written, to its end once the writer is gone."""
    pending, position = "", 0
    while True:
        last = not alive()
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(position)
                pending += file.read()
                position = file.tell()
        *lines, pending = pending.split("\n")
        yield from (json.loads(line) for line in lines)
        if last:
            return
        if not lines:
            time.sleep(POLL_S)


def _collected(
    records: Iterable[Mapping[str, Any]], on_progress: Callable[[int, int, Case], None]
) -> list[Case]:
    selected, cases = 0, []
    for record in records:
        if record["event"] == "selected":
            selected = record["cases"]
        else:
            cases.append(Case.of(record))
            on_progress(len(cases), max(selected, len(cases)), cases[-1])
    return cases


# ---------------------------------------------------------------- what the cases come to


def counts(cases: Iterable[Case]) -> dict[str, int]:
    """How many cases had each outcome."""
    found = dict.fromkeys(OUTCOMES, 0)
    for case in cases:
        found[case.outcome] += 1
    return found


def summary(cases: Sequence[Case], unsupported: Iterable[str]) -> dict[str, Any]:
    """Counts by operation and dtype, by area, and every failure.

    unsupported: the operations the backend declares not to have; each other one needs a case.
    """
    kinds = sorted({(op, case.dtype) for case in cases for op in case.operations})
    passed = {op for case in cases if case.outcome == "passed" for op in case.operations}
    failures = [
        {"id": case.id, "area": case.area, "message": case.message}
        for case in cases
        if case.outcome == "failed"
    ]
    failures += [
        {"id": operation, "area": "kernels", "message": "no case of this operation passed"}
        for operation in OPERATIONS
        if operation not in passed and operation not in set(unsupported)
    ]
    return {
        "total": counts(cases),
        "seconds": round(sum(case.seconds for case in cases), 1),
        "operations": [
            {"operation": op, "dtype": dtype or "any"}
            | counts(case for case in cases if op in case.operations and case.dtype == dtype)
            for op, dtype in kinds
        ],
        "areas": {
            area: counts(case for case in cases if case.area == area)
            for area in sorted({case.area for case in cases})
        },
        "unsupported": sorted({case.message for case in cases if case.outcome == "unsupported"}),
        "failures": failures,
    }


# ---------------------------------------------------------------- the report


def signed(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with the SHA-256 of its content: of its JSON, keys sorted, without blanks."""
    return {"report": dict(report), "sha256": content_hash(report)}


def content_hash(report: Mapping[str, Any]) -> str:
    """SHA-256 of a report, in hexadecimal digits."""
    text = json.dumps(report, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def markdown(signed_report: Mapping[str, Any]) -> str:
    """The report for people."""
    report = signed_report["report"]
    lines = [
        f"# Polychip on backend {report['backend']['name']}: {report['outcome']}",
        "",
        *(f"- {name}: {text}" for name, text in _facts(report)),
        f"- SHA-256 of the content: `{signed_report['sha256']}`",
        "",
        "## Devices",
        "",
        *_rows(("index", "id", "memory", "description"), report["devices"]),
        "",
        "## Capabilities",
        "",
        *(f"- {name}: {value}" for name, value in report["capabilities"].items()),
        "",
        "## Probes",
        "",
        *_rows(("name", "ok", "seconds", "detail"), report["probes"]),
        *(f"- note: {text}" for text in report["notes"]),
        "",
        "## Operations and what computes them",
        "",
        *_rows(("operation", "dtype", "implementation", "reason"), report["operations"]),
    ]
    if report.get("conformance"):
        lines += ["", *_conformance_lines(report["conformance"])]
    return "\n".join(lines) + "\n"


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items())
    return [
        ("date", report["date"]),
        ("versions", versions),
        ("backend", f"{report['backend']['name']} of {report['backend']['package']}"),
        ("host", ", ".join(f"{name} {text}" for name, text in report["host"].items())),
    ]


def _conformance_lines(found: Mapping[str, Any]) -> list[str]:
    total = ", ".join(f"{count} {name}" for name, count in found["total"].items())
    areas = [{"area": area, **numbers} for area, numbers in found["areas"].items()]
    lines = ["## Conformance", "", f"{total}; {found['seconds']} s.", ""]
    lines += _rows(("area", *OUTCOMES), areas)
    lines += ["", "### Cases by operation and dtype", ""]
    lines += _rows(("operation", "dtype", *OUTCOMES), found["operations"])
    lines += ["", "### Declared unsupported", ""]
    lines += [f"- {reason}" for reason in found["unsupported"]] or ["Nothing."]
    lines += ["", "### Failures", ""]
    if not found["failures"]:
        lines.append("None.")
    for failure in found["failures"]:
        lines += [f"#### {failure['id']}", "", "```", failure["message"].strip(), "```", ""]
    return lines


def _rows(heads: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table of Markdown; a bar in a cell would end it."""
    cells = [[str(row[head]).replace("|", "\\|") for head in heads] for row in rows]
    return [_row(heads), _row(["---"] * len(heads)), *(_row(each) for each in cells)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
