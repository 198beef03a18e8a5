"""The ranks of a group in one process, with the cpu backend's collectives through shared memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from backends.cpu.shared_memory_communicator import SharedMemoryCommunicator
from backends.cpu.shared_memory_end import SharedMemoryEnd, SharedMemorySettings
from backends.cpu.shared_memory_library import Library
from backends.cpu.shared_memory_segment import Segment
from backends.errors import CommunicatorError
from backends.interface import Communicator, Device, GroupPlace
from tests.fakes.compute_group import ThreadRuntime
from tests.fakes.rank_threads import Meeting

SMALL = SharedMemorySettings(buffer_bytes=4096, rings_bytes=0)
"""Most messages are larger than a buffer."""
BOUND_S = 15.0


def open_communicators(
    world_size: int, deadline_s: float, settings: SharedMemorySettings
) -> list[SharedMemoryCommunicator]:
    """Those of all ranks, without a rendezvous."""
    library, geometry = Library(), settings.geometry(world_size)
    segment = Segment.create("test", library.segment_bytes_for(geometry))
    segment.close()
    timing = settings.timing(deadline_s)
    ends = [SharedMemoryEnd(library, segment, rank, geometry, timing) for rank in range(world_size)]
    for end in ends:
        end.join(1)
    for end in ends:
        end.start()
    return [SharedMemoryCommunicator(end, rank, world_size, None) for rank, end in enumerate(ends)]


class SharedMemoryRuntime(ThreadRuntime):
    """Collectives through shared memory between threads; who comes first makes all the ends."""

    _made: ClassVar[WeakKeyDictionary[Meeting, list[SharedMemoryCommunicator]]] = (
        WeakKeyDictionary()
    )
    _lock = threading.Lock()

    def create_communicator(
        self, device: Device, place: GroupPlace, rendezvous: bytes
    ) -> Communicator:
        if place.world_size == 1:
            return super().create_communicator(device, place, rendezvous)
        with self._lock:
            if self.meeting not in self._made:
                self._made[self.meeting] = open_communicators(
                    place.world_size, place.step_deadline_s, SharedMemorySettings()
                )
            return self._made[self.meeting][place.rank]


class SharedMemoryRanks:
    """The ranks of a group as threads; `form` makes their communicators."""

    def __init__(self) -> None:
        self.communicators: list[SharedMemoryCommunicator] = []

    def form(
        self,
        world_size: int = 2,
        deadline_s: float = BOUND_S,
        settings: SharedMemorySettings = SMALL,
    ) -> list[SharedMemoryCommunicator]:
        """Those of a new group."""
        self.communicators = open_communicators(world_size, deadline_s, settings)
        return self.communicators

    def together(self, function: Callable[[SharedMemoryCommunicator], Any]) -> list[Any]:
        """Results by rank; an error of the communicator is a result too."""

        def run(communicator: SharedMemoryCommunicator) -> Any:
            try:
                return function(communicator)
            except CommunicatorError as error:
                return error

        with ThreadPoolExecutor(len(self.communicators)) as pool:
            return list(pool.map(run, self.communicators, timeout=60.0))

    def close(self) -> None:
        """Closes the communicators."""
        for communicator in self.communicators:
            communicator.close()
