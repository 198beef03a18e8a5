"""The settings file of `polychip calibrate`: it reads as it was written, and refuses all else."""

import json
from dataclasses import replace

import pytest

from control_plane.errors import ConfigurationError
from control_plane.scheduling.step_time import StepWork
from scripts.calibration.calibration_file import FILE_BYTES_MAX, read_calibration
from tests.fakes.calibrations import CALIBRATION


def written(path, change):
    """A file as it is written, and then changed."""
    CALIBRATION.write(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def refusal(path):
    with pytest.raises(ConfigurationError) as refused:
        read_calibration(path)
    return str(refused.value)


@pytest.mark.parametrize("points", [CALIBRATION.points, ()])
def test_it_reads_as_it_was_written(tmp_path, points):
    calibration = replace(CALIBRATION, points=points)
    path = tmp_path / "calibration.json"
    calibration.write(path)
    assert read_calibration(path) == calibration
    assert list(tmp_path.iterdir()) == [path]


def test_the_keys_are_those_documented(tmp_path):
    path = tmp_path / "calibration.json"
    CALIBRATION.write(path)
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["settings"] == {"chunk_tokens": 512, "running_max": 16}
    assert content["step_time"]["decode_row_s"] == 5e-4
    assert content["points"][1] == {
        "chunk_tokens": 0,
        "chunk_context": 0,
        "decode_rows": 4,
        "decode_context": 400,
        "seconds": 0.0064,
    }


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    folder = tmp_path / "calibration.json"
    folder.mkdir()
    with pytest.raises(OSError, match=r"calibration\.json"):
        CALIBRATION.write(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_model_predicts_a_step():
    work = StepWork(chunk_tokens=100, chunk_context=5050, decode_rows=4, decode_context=400)
    expected_s = 0.004 + 100 * 4e-4 + 5050 * 1e-7 + 4 * 5e-4 + 400 * 1e-6
    assert CALIBRATION.step_time.predict(work) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("change", "key", "allowed"),
    [
        (lambda c: c.update(format=2), "format is 2", "must be 1"),
        (lambda c: c.update(group_size=0), "group_size is 0", "from 1 to"),
        (lambda c: c.update(kv_blocks=1.5), "kv_blocks is 1.5", "a whole number"),
        (lambda c: c.update(device=7), "device is 7", "a text"),
        (lambda c: c["settings"].update(chunk_tokens=True), "settings.chunk_tokens", "is true"),
        (lambda c: c["settings"].update(running_max="8"), 'settings.running_max is "8"', "whole"),
        (lambda c: c["step_time"].update(step_s=-1), "step_time.step_s is -1", "seconds from 0"),
        (lambda c: c["step_time"].update(step_s=float("nan")), "step_time.step_s is NaN", "from 0"),
        (lambda c: c["step_time"].update(step_s=float("inf")), "step_s is Infinity", "from 0"),
        (lambda c: c["points"][1].update(seconds=None), "points[1].seconds is null", "seconds"),
        (lambda c: c["points"][0].update(decode_rows=-1), "points[0].decode_rows", "from 0"),
        (lambda c: c.update(points={}), "points is {}", "a list"),
        (lambda c: c.update(points=[0] * 20_000), "points is [0, 0", "at most 10000"),
        (lambda c: c.update(settings=[]), "settings is []", "an object"),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_refused(tmp_path, change, key, allowed):
    path = written(tmp_path / "own.json", change)
    said = refusal(path)
    assert key in said
    assert allowed in said
    assert str(path) in said
    assert "polychip calibrate" in said
    assert len(said) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda c: c.update(chunk_tokens=512), "chunk_tokens is unknown"),
        (lambda c: c["settings"].update(max_running=8), "settings.max_running is unknown"),
        (lambda c: c["points"][0].update(ms=1), "points[0].ms is unknown"),
        (lambda c: c.pop("model_digest"), "model_digest is missing"),
        (lambda c: c["step_time"].pop("step_s"), "step_time.step_s is missing"),
    ],
)
def test_every_key_must_be_there_and_no_other(tmp_path, change, key):
    said = refusal(written(tmp_path / "own.json", change))
    assert key in said
    assert str(tmp_path / "own.json") in said


@pytest.mark.parametrize("content", ["", "{", "\xff", "[" * 100_000, "1 2"])
def test_what_is_not_json_is_refused(tmp_path, content):
    path = tmp_path / "own.json"
    path.write_text(content, encoding="latin-1")
    assert f"{path} is not JSON" in refusal(path)


def test_a_file_without_an_object_is_refused(tmp_path):
    path = tmp_path / "own.json"
    path.write_text("[]")
    assert "its content is []; it must be an object" in refusal(path)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "none.json")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    path = tmp_path / "large.json"
    path.write_text(" " * (FILE_BYTES_MAX + 1))
    assert f"more than {FILE_BYTES_MAX} bytes" in refusal(path)
