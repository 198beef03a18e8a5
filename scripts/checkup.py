"""What `polychip doctor` finds out about one backend, said line by line and kept as a report.

Patient (a backend, no torch) --> examinations in child processes --> report, plain values
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from backends.plugin import (
    API_VERSION,
    BUILT_IN,
    ENTRY_POINT_GROUP,
    Backend,
    BackendConfig,
    ChipDescription,
)
from scripts.examining import Findings, Probe, examine_chips, examine_group
from scripts.text_table import text_table

RANKS = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Patient:
    """A backend to examine, and what it is told of its chips."""

    name: str
    backend: Backend
    config: BackendConfig
    chips: Sequence[ChipDescription]

    def task(self) -> dict[str, Any]:
        """What its child processes are told."""
        return {
            "backend": self.name,
            "devices": list(self.config.devices),
            "chips_on_host": self.config.chips_on_host,
            "dtype": self.config.dtype,
            "options": dict(self.config.options),
            "chips": [chip.index for chip in self.chips],
        }


def examine(patient: Patient, deadline_s: float, say: Say) -> dict[str, Any]:
    """Everything but the conformance suite, said line by line; the report's content."""
    report = _identity(patient)
    for line in (*_opening_lines(report), "Probes"):
        say(line)
    findings = Findings()

    def on_probe(probe: Probe) -> None:
        *before, last = probe.detail.strip().splitlines() or [""]
        verdict = "ok    " if probe.ok else "FAILED"
        say(f"  {verdict} {probe.seconds:7.2f} s  {probe.name}  {last}".rstrip())
        for line in before:
            say(f"      {line}")

    examine_chips(patient.task(), deadline_s, findings, on_probe)
    _examine_group(patient, deadline_s, findings, on_probe, say)
    for line in (*(f"  note: {text}" for text in findings.notes), *_operation_lines(findings)):
        say(line)
    report["probes"] = [asdict(probe) for probe in findings.probes]
    report["operations"] = findings.operations
    report["notes"] = findings.notes
    report["outcome"] = "passed" if findings.ok and patient.chips else "failed"
    return report


def _examine_group(
    patient: Patient,
    deadline_s: float,
    findings: Findings,
    on_probe: Callable[[Probe], None],
    say: Say,
) -> None:
    """Needs two chips; a backend may have them once it is told that two are used."""
    task = patient.task() | {"chips_on_host": max(RANKS, patient.config.chips_on_host)}
    there = patient.backend.select_chips(
        BackendConfig(
            chip_indices=(),
            devices=patient.config.devices,
            chips_on_host=task["chips_on_host"],
            options=patient.config.options,
        )
    )
    if len(there) < RANKS:
        say(f"  not tried: a collective needs {RANKS} chips")
        return
    examine_group(task, RANKS, deadline_s, findings, on_probe)


# ---------------------------------------------------------------- what is known without a chip


def _identity(patient: Patient) -> dict[str, Any]:
    """Date, versions, host, devices and capabilities."""
    name = patient.name.partition(":")[0]
    capabilities = asdict(patient.backend.capabilities)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "polychip": version("polychip"),
            "python": platform.python_version(),
            "torch": _version_of("torch"),
            "backend API": ".".join(map(str, API_VERSION)),
        },
        "host": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "name": platform.node(),
        },
        "backend": {
            "name": patient.name,
            "variant": patient.backend.variant,
            "device type": patient.backend.device_type(),
            "package": _package_of(name),
            "options": dict(patient.config.options),
        },
        "devices": [
            {
                "index": chip.index,
                "id": chip.known_as,
                "memory": _memory(chip.memory_bytes),
                "memory_bytes": chip.memory_bytes,
                "description": chip.description,
            }
            for chip in patient.chips
        ],
        "capabilities": {each: _plain(value) for each, value in capabilities.items()},
    }


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _package_of(name: str) -> str:
    """The package a backend comes in, with its version."""
    if name in BUILT_IN:
        return f"polychip {version('polychip')} (built in)"
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name and entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
    return "unknown"


def _memory(memory_bytes: int) -> str:
    return f"{memory_bytes / 1e9:.1f} GB" if memory_bytes else "unknown"


def _plain(value: object) -> object:
    """A value that JSON has."""
    return sorted(value) if isinstance(value, frozenset) else value


def _opening_lines(report: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {text}" for name, text in report["versions"].items())
    rows = [("index", "device", "memory", "description")]
    rows += [
        (str(each["index"]), each["id"], each["memory"], each["description"])
        for each in report["devices"]
    ]
    capabilities = [
        (name, ", ".join(value) or "none" if isinstance(value, list | tuple) else str(value))
        for name, value in report["capabilities"].items()
    ]
    return [
        f"Backend {report['backend']['name']} of {report['backend']['package']}",
        versions,
        "",
        "Devices",
        *(f"  {line}" for line in text_table(rows)),
        "",
        "Capabilities",
        *(f"  {line}" for line in text_table(capabilities)),
        "",
    ]


def _operation_lines(findings: Findings) -> list[str]:
    """The table of operations, for every dtype that is computed in."""
    rows = [("operation", "dtype", "implementation", "reason", "not chosen")]
    for each in findings.operations:
        rejected = "; ".join(f"{name}: {problem}" for name, problem in each["rejected"])
        chosen = (each["operation"], each["dtype"], each["implementation"], each["reason"])
        rows.append((*chosen, rejected))
    return ["", "Operations", *(f"  {line}" for line in text_table(rows)), ""]
