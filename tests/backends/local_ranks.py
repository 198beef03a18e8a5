"""The ranks of a group as threads of one process, each with a chip and a runtime of its own.

As in a worker, one thread does all that a rank does.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from backends.errors import CommunicatorError
from backends.interface import (
    BackendConfig,
    BackendRuntime,
    Communicator,
    Device,
    GroupPlace,
    open_runtime,
)
from backends.plugin import find_backend

JOIN_DEADLINE_S = 20.0
ENDED_WITHIN_S = 60.0
TRAVEL_S = 0.03
"""How long an address travels to the other ranks. torch's store lets a client that comes in the
instant after it opened wait for 5 s, in about one of thirty cases (measured)."""
_epochs = itertools.count(1)


class LocalRanks:
    """Chips 0 .. world_size - 1, open; `form` makes their communicators anew."""

    def __init__(self, backend_name: str, world_size: int, options: dict[str, str]) -> None:
        self.world_size = world_size
        self.communicators: list[Communicator] = []
        self._threads = [ThreadPoolExecutor(1) for _ in range(world_size)]
        opened = self.together(lambda rank: _open_chip(backend_name, rank, world_size, options))
        self.runtimes: list[BackendRuntime] = [runtime for runtime, _ in opened]
        self.devices: list[Device] = [device for _, device in opened]

    def form(self, step_deadline_s: float = JOIN_DEADLINE_S) -> None:
        """A new epoch: the communicators of the last one are closed."""
        self.leave()
        key = f"group0/epoch{next(_epochs)}"
        places = [
            GroupPlace(rank, self.world_size, key, JOIN_DEADLINE_S, step_deadline_s)
            for rank in range(self.world_size)
        ]
        address = self.on(0, lambda: self.runtimes[0].open_rendezvous(places[0]))
        time.sleep(TRAVEL_S)
        self.communicators = self.together(
            lambda rank: self.runtimes[rank].create_communicator(
                self.devices[rank], places[rank], address
            )
        )

    def on(self, rank: int, function: Callable[[], Any]) -> Any:
        """Runs the function as one rank."""
        return self._threads[rank].submit(function).result(ENDED_WITHIN_S)

    def together(self, function: Callable[[int], Any]) -> list[Any]:
        """Runs the function for every rank at the same time; raises what the first to fail raised.

        A rank's fault makes the others fail too, so theirs is told only if it is the only kind.
        """
        futures = [thread.submit(function, rank) for rank, thread in enumerate(self._threads)]
        errors = [future.exception(ENDED_WITHIN_S) for future in futures]
        wrong = [each for each in errors if each and not isinstance(each, CommunicatorError)]
        for error in (*wrong, *errors):
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def leave(self) -> None:
        """Closes the communicators."""
        for rank, communicator in enumerate(self.communicators):
            self.on(rank, communicator.close)
        self.communicators = []

    def close(self) -> None:
        """Closes everything."""
        self.leave()
        for rank, device in enumerate(self.devices):
            self.on(rank, device.close)
        for thread in self._threads:
            thread.shutdown()


def _open_chip(
    backend_name: str, rank: int, world_size: int, options: dict[str, str]
) -> tuple[BackendRuntime, Device]:
    torch.set_num_threads(1)
    config = BackendConfig(
        chip_indices=(rank,), chips_on_host=world_size, dtype="float32", options=options
    )
    backend = find_backend(backend_name)
    backend.on_init(config)
    runtime = open_runtime(backend, config)
    acquired = runtime.acquire(1)
    assert acquired.granted, acquired.rejected
    torch.set_num_threads(1)
    return runtime, acquired.granted[0]
