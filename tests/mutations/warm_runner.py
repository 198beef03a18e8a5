"""Runs one named test against one edited copy of the sources, many times, from one warm process.

    warm_runner.py FOLDER     FOLDER holds a copy of the project
    stdin:  one JSON object a line: {"file", "old", "new", "test", "backend", "options"}
    stdout: one JSON object a line: {"code", "seconds", "output"}

Everything slow to import is imported once; each run is a fork that sees the edited file. Project
modules are imported in the forks only, so that nothing of an earlier edit is left.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np  # noqa: F401 - warm
import pytest
import torch

RUN_DEADLINE_S = 120.0
NATIVE = Path("backends/cpu/native")
LIBRARY = NATIVE / "build/libpolychip_collectives.so"
COMPILE = ("g++", "-O1", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden")


def main() -> None:
    folder = Path(sys.argv[1])
    os.chdir(folder)
    # The folder of this program must not be what `tests` or `backends` is found in.
    sys.path[0] = str(folder)
    torch.set_num_threads(1)
    for line in sys.stdin:
        edit = json.loads(line)
        answer = run_edited(edit, folder / edit["file"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def run_edited(edit: dict[str, str], path: Path) -> dict[str, object]:
    source = path.read_text()
    path.write_text(source.replace(edit["old"], edit["new"]))
    native = path.suffix == ".cpp"
    try:
        if native:
            link_with(path.relative_to(Path.cwd()))
        return run_in_fork(edit)
    finally:
        path.write_text(source)
        if native:
            LIBRARY.unlink()
            shutil.copy(LIBRARY.with_suffix(".whole"), LIBRARY)


def link_with(edited: Path) -> None:
    """The library with one edited source; the objects of the others are compiled once."""
    whole = LIBRARY.with_suffix(".whole")
    if not whole.exists():
        shutil.copy(LIBRARY, whole)
    mine = compiled(edited, edited.with_suffix(".edited.o"))
    objects = [mine]
    for source in sorted(NATIVE.glob("*.cpp")):
        if source != edited:
            kept = source.with_suffix(".o")
            objects.append(kept if kept.exists() else compiled(source, kept))
    # A fork of an earlier run may still have the file mapped: a new one takes its place.
    LIBRARY.unlink()
    subprocess.run([*COMPILE, "-shared", *map(str, objects), "-o", str(LIBRARY)], check=True)


def compiled(source: Path, target: Path) -> Path:
    subprocess.run([*COMPILE, "-c", str(source), "-o", str(target)], check=True)
    return target


def run_in_fork(edit: dict[str, str]) -> dict[str, object]:
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            run_test(edit, output.fileno())
        code = wait_for(child, started + RUN_DEADLINE_S)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"code": code, "seconds": time.monotonic() - started, "output": text[-4000:]}


def run_test(edit: dict[str, str], output: int) -> None:
    """The forked child: never returns."""
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.dont_write_bytecode = True
    options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "--backend", edit["backend"]]
    options += [f"--backend-option={option}" for option in edit["options"]]
    code = pytest.main([*options, edit["test"]])
    sys.stdout.flush()
    os._exit(int(code))


def wait_for(child: int, deadline: float) -> int:
    """The exit code; -1 if it did not end in time and was killed with all its processes."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return -1


if __name__ == "__main__":
    main()
