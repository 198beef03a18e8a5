"""Opens the backend under test once per session; `--backend` picks it.

Together with its tests this is the conformance suite: it uses the contracts only, and never reads
or writes a chip's tensor but through a kernel or the device. A test says what it covers:

    @pytest.mark.covers("linear")                     in the dtype of its parameter `dtype`
    @pytest.mark.covers("sample", dtype="float32")    in one dtype

What a backend declares not to do is skipped with a reason that begins with "unsupported:"; what
does not concern it, with "not applicable:". `polychip doctor --conformance` reports both.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from backends.interface import Backend, BackendConfig, BackendRuntime, Device, open_runtime
from backends.plugin import find_backend
from tests.backends.kernel_calls import KernelCalls
from tests.backends.local_ranks import LocalRanks
from tests.backends.rank_processes import RankProcesses


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `dtype` and names none runs in every dtype the backend declares."""
    named = any(
        "dtype" in str(marker.args[:1])
        for marker in metafunc.definition.iter_markers("parametrize")
    )
    if "dtype" in metafunc.fixturenames and not named:
        names = find_backend(str(metafunc.config.getoption("--backend"))).capabilities.dtypes
        metafunc.parametrize("dtype", [getattr(torch, name) for name in names], ids=names)


@pytest.fixture(autouse=True)
def declared(request: pytest.FixtureRequest, backend: Backend) -> None:
    """Leaves out what the backend declares not to have."""
    for marker in request.node.iter_markers("covers"):
        missing = sorted(backend.capabilities.unsupported.intersection(marker.args))
        if missing:
            pytest.skip(f"unsupported: the backend declares to have no {', '.join(missing)}")


@pytest.fixture(scope="session")
def config(backend_options: dict[str, str]) -> BackendConfig:
    return BackendConfig(chip_indices=(0,), dtype="float32", options=backend_options)


@pytest.fixture(scope="session")
def backend(backend_name: str, config: BackendConfig) -> Backend:
    opened = find_backend(backend_name)
    opened.on_init(config)
    return opened


@pytest.fixture(scope="session")
def runtime(backend: Backend, config: BackendConfig) -> BackendRuntime:
    return open_runtime(backend, config)


@pytest.fixture(scope="session")
def device(runtime: BackendRuntime):
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    opened: Device = runtime.acquire(1).granted[0]
    yield opened
    opened.close()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), affinity)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other at every call crawl when the machine does other work too."""
    torch.set_num_threads(1)


@pytest.fixture
def call(runtime: BackendRuntime, device: Device) -> KernelCalls:
    """Calls the backend's choice for an operation with host tensors; the result is on the host."""
    return KernelCalls(runtime, device)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, backend_name: str) -> Iterator[LocalRanks]:
    """Two and three ranks as threads; what their communicators are is the test's."""
    opened = LocalRanks(backend_name, request.param, {})
    yield opened
    opened.close()


@pytest.fixture
def start_ranks(
    backend_name: str, backend_options: dict[str, str], tmp_path: Path
) -> Iterator[Callable[..., RankProcesses]]:
    """Starts ranks as processes that run a scenario; whatever still runs at the end is killed."""
    started: list[RankProcesses] = []

    def start(scenario: str, world_size: int) -> RankProcesses:
        options = json.dumps(backend_options)
        started.append(RankProcesses(backend_name, options, scenario, world_size, tmp_path))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()
