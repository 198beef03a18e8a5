"""The settings file: `polychip calibrate` writes it, `polychip serve` and `plan` read it.

{"format": 1, "model": "models/model.gguf", "model_digest": "5f1c...", "backend": "cpu",
 "group_size": 1, "dtype": "bfloat16", "weights": "auto", "device": "CPU, 2 cores",
 "measured_at": "2026-11-30T13:10:00+00:00",
 "settings": {"chunk_tokens": 512, "running_max": 16},
 "step_time": {"step_s": 0.004, "chunk_token_s": 0.0004, "chunk_context_s": 1e-7,
               "decode_row_s": 0.0005, "decode_context_s": 1e-6},
 "block_tokens": 16, "kv_blocks": 2048,
 "points": [{"chunk_tokens": 64, "chunk_context": 2080, "decode_rows": 0, "decode_context": 0,
             "seconds": 0.03}]}

Every key must be there and no other, so that a misspelt one is noticed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn

from control_plane.errors import ConfigurationError
from control_plane.scheduling.step_time import StepWork, step_seconds
from control_plane.whole_file import write_whole

FORMAT = 1
FILE_BYTES_MAX = 4 << 20
POINTS_MAX = 10_000
COUNT_MAX = 1 << 40
"""More tokens than any chip attends to in a step; settings have limits of their own."""
SECONDS_MAX = 86_400.0
SHOWN_CHARACTERS = 60
REMEDY = "correct it, or write the file again with `polychip calibrate`"


@dataclass(frozen=True, slots=True)
class CalibratedSettings:
    """What the measurements recommend, by the names of the control plane's configuration."""

    chunk_tokens: int
    running_max: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """The linear model of control_plane/scheduling/step_time.py; all in seconds, none negative.

    step_s: every step. chunk_token_s: a prompt's token. chunk_context_s: a prompt's token and token
    it attends to. decode_row_s: a row that decodes. decode_context_s: a token it attends to.
    """

    step_s: float
    chunk_token_s: float
    chunk_context_s: float
    decode_row_s: float
    decode_context_s: float

    def predict(self, work: StepWork) -> float:
        """Expected seconds of a step."""
        return step_seconds(work, **asdict(self))


@dataclass(frozen=True, slots=True)
class Point:
    """A step of known work, and the median of the seconds it took."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, on what, and what it recommends.

    model, dtype and weights: dtype as the worker computes, the others as they were asked for.
    kv_blocks: of the smallest pool of the group, `block_tokens` tokens each. measured_at: ISO 8601.
    """

    model: str
    model_digest: str
    backend: str
    group_size: int
    dtype: str
    weights: str
    device: str
    measured_at: str
    settings: CalibratedSettings
    step_time: StepTime
    block_tokens: int
    kv_blocks: int
    points: tuple[Point, ...]

    def write(self, path: Path) -> None:
        """As `write_whole` does. Raises OSError."""
        write_whole(path, self._text())

    def content(self) -> dict[str, object]:
        """What the file holds."""
        points = [{**point.work._asdict(), "seconds": point.seconds} for point in self.points]
        return {"format": FORMAT, **asdict(self), "points": points}

    def _text(self) -> str:
        """Every point on a line of its own: a person may look."""
        content = self.content()
        points = content.pop("points")
        assert isinstance(points, list)
        joined = ",\n    ".join(json.dumps(point) for point in points)
        head = json.dumps(content, indent=2).removesuffix("\n}")
        return f'{head},\n  "points": [\n    {joined}\n  ]\n}}\n'


def read_calibration(path: Path) -> Calibration:
    """A file that `Calibration.write` wrote, or a person.

    Raises ConfigurationError naming the file, the key, what it may be and the remedy.
    """
    top = _Section(path, "", _content(path), ("format", *_names(Calibration)))
    top.whole("format", FORMAT, FORMAT)
    settings = top.section("settings", _names(CalibratedSettings))
    step_time = top.section("step_time", _names(StepTime))
    points = top.sections("points", (*StepWork._fields, "seconds"))
    texts = ("model", "model_digest", "backend", "dtype", "weights", "device", "measured_at")
    return Calibration(
        **{key: top.text(key) for key in texts},
        group_size=top.whole("group_size", 1),
        settings=CalibratedSettings(
            **{key: settings.whole(key, 1) for key in _names(CalibratedSettings)}
        ),
        step_time=StepTime(**{key: step_time.seconds(key) for key in _names(StepTime)}),
        block_tokens=top.whole("block_tokens", 1),
        kv_blocks=top.whole("kv_blocks", 1),
        points=tuple(
            Point(
                StepWork(*(point.whole(key, 0) for key in StepWork._fields)),
                point.seconds("seconds"),
            )
            for point in points
        ),
    )


def _names(kind: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _content(path: Path) -> object:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigurationError(
                f"{path} has more than {FILE_BYTES_MAX} bytes, so it is no file of "
                "`polychip calibrate`; name the one it wrote"
            )
        parsed: object = json.loads(content)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}; name the file that `polychip calibrate` "
            "wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}; {REMEDY}") from error
    return parsed


class _Section:
    """An object of the file; its methods take a key's value, or say what is wrong with it."""

    def __init__(self, path: Path, name: str, value: object, keys: tuple[str, ...]) -> None:
        self._path, self._name = path, name
        if not isinstance(value, dict):
            self._refuse(name or "its content", value, "an object")
        self._values: Mapping[str, object] = value
        for key in value:
            if key not in keys:
                raise ConfigurationError(
                    f"{path}: {self._key(key)} is unknown; the keys there are {', '.join(keys)}: "
                    "remove it"
                )
        for key in keys:
            if key not in value:
                raise ConfigurationError(f"{path}: {self._key(key)} is missing; {REMEDY}")

    def text(self, key: str) -> str:
        value = self._values[key]
        if not isinstance(value, str):
            self._refuse(self._key(key), value, "a text")
        return value

    def whole(self, key: str, least: int, most: int = COUNT_MAX) -> int:
        value = self._values[key]
        # In Python true and false are numbers.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            limits = f"{least}" if least == most else f"a whole number from {least} to {most}"
            self._refuse(self._key(key), value, limits)
        return value

    def seconds(self, key: str) -> float:
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(self._key(key), value, "a number of seconds")
        if not 0 <= value < SECONDS_MAX:
            self._refuse(self._key(key), value, f"seconds from 0 to {SECONDS_MAX:g}")
        return float(value)

    def section(self, key: str, keys: tuple[str, ...]) -> "_Section":
        return _Section(self._path, self._key(key), self._values[key], keys)

    def sections(self, key: str, keys: tuple[str, ...]) -> "list[_Section]":
        values = self._values[key]
        if not isinstance(values, list) or len(values) > POINTS_MAX:
            self._refuse(self._key(key), values, f"a list of at most {POINTS_MAX} points")
        name = self._key(key)
        return [_Section(self._path, f"{name}[{i}]", value, keys) for i, value in enumerate(values)]

    def _key(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _refuse(self, key: str, value: object, allowed: str) -> NoReturn:
        shown = json.dumps(value)
        shown = shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "..."
        raise ConfigurationError(f"{self._path}: {key} is {shown}; it must be {allowed}: {REMEDY}")
