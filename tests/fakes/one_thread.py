"""A fixture for folders whose tests compute in this process; their conftest imports it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread computes, whatever chip is opened here.

    Threads that wait for each other at every call crawl when the machine does other work too.
    """
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
