"""Runs examinations of chips as child processes, and ends those that hang.

doctor --> examine_chips, examine_group --> python -m scripts.examination --> Probe, operations
"""

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.conformance import ROOT

PROGRAM = ("-m", "scripts.examination")
START_DEADLINE_S = 120.0
"""torch is imported first, which takes a while on a busy machine."""
JOIN_SHARE = 2
"""How often the deadline of a collective fits into the time its processes get."""
ERROR_CHARACTERS_MAX = 2000


@dataclass(frozen=True)
class Probe:
    """A piece of work with a known result; detail: what was found, or why it failed."""

    name: str
    ok: bool
    seconds: float
    detail: str


@dataclass
class Findings:
    """What examinations found."""

    probes: list[Probe] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return all(probe.ok for probe in self.probes) and all(
            each["ok"] for each in self.operations
        )


class Examination:
    """One child process; `task` is what it is told, `deadline_s` bounds each of its steps."""

    def __init__(self, task: Mapping[str, Any], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._process = subprocess.Popen(
            [sys.executable, *PROGRAM, json.dumps(task)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors = ""
        self._readers = [threading.Thread(target=read) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = (self._errors + line)[-ERROR_CHARACTERS_MAX:]

    def events(self) -> Iterator[dict[str, Any]]:
        """What it tells; a step that takes too long, or ends the process, is a failed probe."""
        begun, limit_s = "the examination starts", START_DEADLINE_S
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                self.end()
                yield _failed(begun, limit_s, f"no answer in {limit_s:g} s; it was ended")
                return
            if line is None:
                break
            event = json.loads(line)
            begun, limit_s = event.get("probe", begun), self._deadline_s
            yield event
        self.end()
        if self._process.returncode != 0:
            why = f"the process ended with status {self._process.returncode}: {self._errors}"
            yield _failed(begun, 0.0, why)

    def end(self) -> None:
        """Ends the process if it still runs."""
        if not self._lines.empty() or self._readers[0].is_alive():
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def _failed(name: str, seconds: float, detail: str) -> dict[str, Any]:
    return {"event": "probe", "probe": name, "ok": False, "seconds": seconds, "detail": detail}


def examine_chips(
    task: Mapping[str, Any],
    deadline_s: float,
    findings: Findings,
    on_probe: Callable[[Probe], None],
) -> None:
    """Opens and probes chip after chip; after one that hangs the next process takes the rest."""
    left: Sequence[int] = task["chips"]
    operations: list[dict[str, Any]] = []
    while left:
        probed, operations = 0, []
        for event in Examination({**task, "task": "chips", "chips": left}, deadline_s).events():
            if event["event"] == "operation":
                operations.append({k: v for k, v in event.items() if k != "event"})
            elif event["event"] == "probe":
                probed += 1
            _note(event, findings, on_probe)
        # A process that ends before its first chip fails for all of them alike.
        left = left[max(1, probed) :] if probed < len(left) and operations else []
        findings.operations = operations or findings.operations


def examine_group(
    task: Mapping[str, Any],
    world_size: int,
    deadline_s: float,
    findings: Findings,
    on_probe: Callable[[Probe], None],
) -> None:
    """A collective between processes, each with a chip of its own."""
    with tempfile.TemporaryDirectory(prefix="polychip-doctor-") as folder:
        ranks = [
            Examination(
                {
                    **task,
                    "task": "rank",
                    "chips": [rank],
                    "rank": rank,
                    "world_size": world_size,
                    "folder": folder,
                    "deadline_s": deadline_s,
                },
                JOIN_SHARE * deadline_s,
            )
            for rank in range(world_size)
        ]
        try:
            for rank in ranks:
                for event in rank.events():
                    _note(event, findings, on_probe)
        finally:
            for rank in ranks:
                rank.end()


def _note(event: Mapping[str, Any], findings: Findings, on_probe: Callable[[Probe], None]) -> None:
    if event["event"] == "note" and event["text"] not in findings.notes:
        findings.notes.append(event["text"])
    elif event["event"] == "probe":
        probe = Probe(event["probe"], event["ok"], event["seconds"], event["detail"])
        findings.probes.append(probe)
        on_probe(probe)
