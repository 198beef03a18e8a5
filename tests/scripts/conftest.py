"""What every test of the commands has."""

import contextlib
import importlib
import importlib.util

import pytest

# They make checkpoints or open chips; the run on Python 3.10 has no torch.
collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else [
        "test_bench_step.py",
        "test_calibrate.py",
        "test_plan_against_workers.py",
        "test_settings_file.py",
    ]
)


@pytest.fixture(autouse=True)
def no_async_library() -> None:
    """Commands start event loops; what runs async tests may have left word that one runs."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sniffio").current_async_library_cvar.set(None)
