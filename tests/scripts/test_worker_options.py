"""Options of `polychip serve` that are for workers reach every worker."""

import pytest

from chip_worker.__main__ import command as worker
from scripts.cli.serve import serve, settings_lines, settings_of
from scripts.settings import ServeSettings, worker_command


def settings(*options: str) -> ServeSettings:
    values = dict(serve.make_context("serve", list(options)).params)
    del values["announce"]
    return settings_of(values)


@pytest.mark.parametrize(
    ("options", "pattern", "calls"),
    [
        ((), None, 256),
        (("--debug-backend",), "*", 256),
        (("--debug-backend", "--chips", "2"), "*", 256),
        (("--debug-backend", "kernels.*,device.copy"), "kernels.*,device.copy", 256),
        (("--debug-backend=memory.*", "--debug-backend-calls", "9"), "memory.*", 9),
    ],
)
def test_workers_receive_what_serve_was_told(
    options: tuple[str, ...], pattern: str | None, calls: int
) -> None:
    chosen = settings(*options)
    for chip_index in range(chosen.chips_count):
        arguments = worker_command(chosen, chip_index, "0")[3:]
        received = worker.make_context("worker", arguments).params
        assert (received["debug_backend"], received["debug_backend_calls"]) == (pattern, calls)
    (line,) = (each for each in settings_lines(chosen) if each.split()[0] == "debug-backend")
    assert line.split()[1] == (pattern or "none")


@pytest.mark.parametrize(("options", "tokens"), [((), 256), (("--captured-tokens", "0"), 0)])
def test_workers_are_told_what_to_capture(options: tuple[str, ...], tokens: int) -> None:
    chosen = settings(*options)
    received = worker.make_context("worker", worker_command(chosen, 0, "0")[3:]).params
    assert received["captured_tokens"] == tokens
