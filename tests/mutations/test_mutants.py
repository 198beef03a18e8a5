"""Each edit that breaks a backend quietly turns a named test red: no self-consistent lie stands.

A seeded third runs every time, all of them with --long.
"""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.mutations.mutant import Mutant
from tests.mutations.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
COPIED = ("backends", "kernels", "chip_worker", "control_plane", "protos", "scripts", "tests")
FAILED, PASSED = 1, 0
SEED = 4


def chosen_names(seed: int) -> set[str]:
    """A third of the mutants."""
    names = sorted(mutant.name for mutant in MUTANTS)
    return set(random.Random(seed).sample(names, -(-len(names) // 3)))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """A warm process and the copy of the project it edits."""
    folder = tmp_path_factory.mktemp("mutated") / "project"
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "golden", "field", "end_to_end")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/mutations/warm_runner.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
    )
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=30) == 0


def run(runner, mutant):
    runner.stdin.write(json.dumps(asdict(mutant)) + "\n")
    runner.stdin.flush()
    return json.loads(runner.stdout.readline())


def test_there_are_enough_and_each_has_its_own_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_edit_is_noticed(runner, mutant, long_run, only_seed):
    if not long_run and mutant.name not in chosen_names(SEED if only_seed is None else only_seed):
        pytest.skip("not of this third; --seed picks another, --long runs all")
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.file} has not exactly once: {mutant.old}"
    answer = run(runner, mutant)
    assert answer["code"] in (FAILED, -1), answer["output"]
    # Red because an assertion or a typed error says so, not because the edit does not run at all.
    for accident in ("SyntaxError", "NameError", "ImportError", "no tests ran", "not found"):
        assert accident not in answer["output"], answer["output"]


@pytest.mark.long
@pytest.mark.parametrize(
    "test", sorted({(mutant.test, mutant.backend, mutant.options) for mutant in MUTANTS})
)
def test_without_an_edit_the_same_test_is_green(runner, test):
    name, backend, options = test
    unchanged = Mutant("none", "backends/__init__.py", "\x00", "\x00", name, backend, options)
    answer = run(runner, unchanged)
    assert answer["code"] == PASSED, answer["output"]
