"""Options of every test run, and what tests may ask about them."""

import contextlib
import importlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polychip")
    group.addoption("--long", action="store_true", help="run the tests at full size")
    group.addoption("--seed", type=int, help="run randomized tests with this seed only")
    group.addoption(
        "--backend", default="cpu", help="backend of tests that drive one, also NAME:VARIANT"
    )
    group.addoption(
        "--backend-option",
        dest="backend_options",
        action="append",
        default=[],
        help="NAME=VALUE for that backend",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "covers(*operations, dtype=...): what a test of a backend is a case of"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is long unless asked for."""
    skip = pytest.mark.skip(reason="long; runs with --long")
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """True if the tests run at full size."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def only_seed(request: pytest.FixtureRequest) -> int | None:
    """The one seed randomized tests shall run with, or None."""
    seed = request.config.getoption("--seed")
    assert seed is None or isinstance(seed, int)
    return seed


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """Name of the backend to drive."""
    return str(request.config.getoption("--backend"))


@pytest.fixture(scope="session")
def backend_options(request: pytest.FixtureRequest) -> dict[str, str]:
    """What that backend is told on the command line."""
    texts = request.config.getoption("backend_options")
    return dict(text.split("=", 1) for text in texts)


@pytest.fixture(autouse=True)
def no_async_library() -> None:
    """Tests may start event loops; what runs async tests may have left word that one runs."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sniffio").current_async_library_cvar.set(None)
