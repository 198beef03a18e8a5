"""Opens the backend under test once per session; `--backend` picks it."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from backends.interface import Backend, BackendConfig, BackendRuntime, Device, open_runtime
from backends.plugin import find_backend


@pytest.fixture(scope="session")
def config():
    return BackendConfig(chip_indices=(0,), dtype="float32")


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
