"""Logs of the worker: nothing of a request may show, in neither form."""

import logging

import pytest
import structlog

from chip_worker.logs import configure_logging


@pytest.fixture
def logs():
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("json_lines", [True, False])
def test_a_traceback_names_the_error_but_no_variable(capsys, json_lines):
    configure_logging("info", json_lines)
    prompt = "the secret of the house"
    try:
        raise ValueError(f"a prompt of {len(prompt)} letters")
    except ValueError as error:
        structlog.get_logger().error("test.failed", exc_info=error)
    written = capsys.readouterr().err
    assert "ValueError: a prompt of 23 letters" in written
    assert "the secret of the house" not in written
