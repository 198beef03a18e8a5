"""`polychip serve --settings FILE`: its values hold where nothing else is said, and it says so."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from scripts.cli import serve as serve_module
from scripts.cli.main import main
from scripts.cli.serve import serve, settings_of
from scripts.cli.settings_file import names_from_file, warnings_of
from tests.fakes.calibrations import CALIBRATION
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.word_tokenizer import save_word_tokenizer

FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--worker-port", "0")


def write_model(folder):
    """One that `serve` reads, with a tokenizer."""
    path = write_hugging_face(folder, TinyLlama())
    save_word_tokenizer(folder / "tokenizer.json")
    return path


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path)


@pytest.fixture
def file(tmp_path, model):
    path = tmp_path / "own.json"
    replace(CALIBRATION, model=model, group_size=1).write(path)
    return path


def context_of(*options):
    return serve.make_context("serve", [str(option) for option in options])


def settings(*options):
    values = dict(context_of(*options).params)
    del values["announce"]
    return settings_of(values)


def scheduling(*options):
    found = settings(*options).control_plane.scheduling
    return found.chunk_tokens, found.running_max


def test_the_files_settings_hold_where_their_options_are_not_given(file):
    assert scheduling("--settings", file) == (512, 16)
    assert scheduling("--settings", file, "--max-running", 7) == (512, 7)
    # Wherever it stands, and whatever the value: the default counts too if it is typed.
    assert scheduling("--max-running", 32, "--chunk-tokens", 9, "--settings", file) == (9, 32)


def test_without_a_file_the_defaults_hold():
    assert scheduling() == (512, 32)


def test_only_what_comes_from_the_file_is_said_to(file):
    assert names_from_file(context_of()) == []
    assert sorted(names_from_file(context_of("--settings", file))) == [
        "chunk_tokens",
        "running_max",
    ]
    assert names_from_file(context_of("--settings", file, "--max-running", 16)) == ["chunk_tokens"]


@pytest.fixture
def served(monkeypatch):
    """Runs `polychip serve` up to the start of processes; settings of each start are noted."""
    starts = []

    class NoLauncher:
        def __init__(self, settings, **_):
            starts.append(settings)

        async def run(self):
            return 0

    monkeypatch.setattr(serve_module, "Launcher", NoLauncher)

    def run(*options):
        result = CliRunner().invoke(main, ["serve", *FREE_PORTS, *map(str, options)])
        return result, starts

    return run


def test_serve_prints_where_a_value_comes_from(served, file, model):
    result, starts = served("--model", model, "--settings", file, "--max-running", 5)
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    assert values["chunk-tokens"] == f"512 (from {file})"
    assert values["max-running"] == "5"
    assert values["settings"] == str(file)
    assert result.stderr == ""
    assert starts[0].control_plane.scheduling.running_max == 5


def test_without_a_file_serve_prints_none(served, model):
    result, _ = served("--model", model)
    assert result.exit_code == 0, result.output
    values = dict(
        line.split(maxsplit=1) for line in result.stdout.splitlines() if "settings" in line
    )
    assert values == {"settings": "none"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["settings"].update(max_running=8), "settings.max_running is unknown"),
        (lambda c: c["settings"].update(chunk_tokens=0), "settings.chunk_tokens is 0"),
        (lambda c: c.pop("points"), "points is missing"),
    ],
)
def test_a_file_with_another_key_or_value_is_refused_by_name(served, file, change, reason):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    result, starts = served("--settings", file)
    assert result.exit_code == 2
    assert f"Error: --settings {file}: {reason}" in result.stderr
    assert starts == []


def test_a_value_beyond_its_range_is_refused_by_the_name_of_its_option(served, file):
    content = json.loads(file.read_text())
    content["settings"]["chunk_tokens"] = 5_000_000_000
    file.write_text(json.dumps(content))
    result, starts = served("--settings", file)
    assert result.exit_code == 2
    assert "'--chunk-tokens': 5000000000 is not in the range" in result.stderr
    assert starts == []


def test_a_file_that_is_not_there_is_refused(served, tmp_path):
    result, _ = served("--settings", tmp_path / "none.json")
    assert result.exit_code == 2
    assert "none.json cannot be read: No such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), []),
        (("--dtype", "bfloat16"), []),
        (("--dtype", "float32"), ["with --dtype bfloat16, this service has float32"]),
        (("--weights", "int8"), ["with --weights auto, this service has int8"]),
        (("--groups", "2"), ["with --groups cpu:1, this service has cpu:2"]),
        (
            ("--groups", "1,sim:ideal:1"),
            ["with --groups cpu:1, this service has cpu:1,sim:ideal:1"],
        ),
        (("--chips", "3"), []),
    ],
)
def test_a_calibration_of_something_else_is_a_warning(file, model, options, said):
    warnings = warnings_of(settings("--model", model, "--settings", file, *options))
    assert len(warnings) == len(said)
    for warning, part in zip(warnings, said, strict=True):
        assert part in warning
        assert str(file) in warning


def test_another_model_is_a_warning_and_serves_all_the_same(served, file, tmp_path):
    other = write_model(tmp_path / "other")
    result, starts = served("--model", other, "--settings", file)
    assert result.exit_code == 0, result.output
    assert len(starts) == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Warning: {file} was measured with --model ")
    assert line.endswith("measure again with `polychip calibrate`")
