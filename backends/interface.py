"""All the worker knows of a backend: the four contracts, and the runtime that opens them.

Required of a new backend, over all classes: `Backend.device_type`, `Backend.enumerate_chips`,
`BackendRuntime.open_device`, `Device.allocate`, `Device.copy`. Everything else has a default that
is correct but slow, or raises a typed `UnsupportedOperation`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from backends.arena import Arena
from backends.communicator import (
    Communicator,
    ForwardingCommunicator,
    SingleRankCommunicator,
    Work,
)
from backends.device import CapturedProgram, Device, Fence, Matrix, MemoryInfo
from backends.errors import BackendUnavailable, IncompatibleBackend
from backends.gloo_communicator import GlooCommunicator
from backends.gloo_rendezvous import LOOPBACK, GlooRendezvous
from backends.kernel_table import KernelTable, MakeContiguous, bind_kernels
from backends.memory import BatchRows, KVLayout, KVSpec, MemoryPool
from backends.paged_pool import PagedMemoryPool, paged_layout
from backends.plugin import (
    COMMUNICATOR_HOST,
    Backend,
    BackendConfig,
    ChipDescription,
    load_object,
    reason_of,
)
from backends.probes import probe_device, probe_requirements
from backends.scratch import Lifetime, ScratchArena
from backends.weight_form import WeightForm
from kernels.reference import REFERENCE_IMPLEMENTATIONS
from kernels.spec import SOFT_CAP, WINDOW, BoundKV, Choice, Implementation, Requirement

__all__ = [
    "SOFT_CAP",
    "WINDOW",
    "AcquiredDevices",
    "Arena",
    "Backend",
    "BackendConfig",
    "BackendRuntime",
    "BatchRows",
    "BoundKV",
    "CapturedProgram",
    "ChipDescription",
    "Choice",
    "Communicator",
    "Device",
    "Fence",
    "ForwardingCommunicator",
    "GroupPlace",
    "KVLayout",
    "KVSpec",
    "KernelTable",
    "Lifetime",
    "Matrix",
    "MemoryInfo",
    "MemoryPool",
    "Requirement",
    "ScratchArena",
    "WeightForm",
    "Work",
    "open_runtime",
]


@dataclass(frozen=True)
class AcquiredDevices:
    """Chips that opened and passed the probe, open; and why the others did not, by index."""

    granted: tuple[Device, ...]
    rejected: Mapping[int, str]


@dataclass(frozen=True)
class GroupPlace:
    """A rank's place in a group for one epoch; `key` is unique to the epoch.

    join_deadline_s bounds the wait for all ranks, step_deadline_s every collective after it.
    """

    rank: int
    world_size: int
    key: str
    join_deadline_s: float
    step_deadline_s: float


class BackendRuntime(ABC):
    """A backend once torch may be imported. One instance per worker process."""

    def __init__(self, backend: Backend, config: BackendConfig) -> None:
        self.backend = backend
        self.config = config
        self._rendezvous: GlooRendezvous | None = None
        self._devices: tuple[Device, ...] = ()

    @abstractmethod
    def open_device(self, chip: ChipDescription) -> Device:
        """Opens a granted chip. Raises BackendUnavailable or DeviceError."""

    def acquire(self, count: int) -> AcquiredDevices:
        """Opens and probes the wanted chips until `count` of them passed; goes on with fewer.

        Each probe allocates, copies and multiplies; see `backends.probes`. The caller closes the
        granted ones.
        """
        found = self.backend.on_device_acquire(self.config)
        rejected = dict(found.rejected)
        granted: list[Device] = []
        for chip in found.granted:
            if len(granted) == count:
                break
            try:
                granted.append(self._open_and_probe(chip))
            except Exception as error:  # noqa: BLE001 - a vendor's code raises anything
                rejected[chip.index] = reason_of(error)
        self._devices = tuple(granted)
        return AcquiredDevices(self._devices, rejected)

    def get_device(self, local_rank: int) -> Device:
        """The acquired chip at position `local_rank`."""
        return self._devices[local_rank]

    def _open_and_probe(self, chip: ChipDescription) -> Device:
        device = self.open_device(chip)
        try:
            probe_device(device, self.bind_kernels(probe_requirements(self.dtype())), self.dtype())
        except Exception:
            # What was found first is told, not what a broken chip says to being closed.
            with suppress(Exception):
                device.close()
            raise
        return device

    def kv_layout(self, spec: KVSpec) -> KVLayout:
        """How a block of `spec` is laid out on this make of chip."""
        return paged_layout(spec, self.backend.capabilities.block_alignment_bytes)

    def create_memory_pool(self, device: Device, spec: KVSpec, capacity: int) -> MemoryPool:
        """A pool of `capacity` blocks. Raises OutOfMemory."""
        return PagedMemoryPool(device, spec, self.kv_layout(spec), capacity)

    def implementations(self) -> Sequence[Implementation]:
        """Own kernels, most preferred first; the reference is always behind them."""
        return ()

    def bind_kernels(self, requirements: Mapping[str, Requirement]) -> KernelTable:
        """The kernel table of a model; see `backends.kernel_table.bind_kernels`."""
        return bind_kernels(
            [*self.implementations(), *REFERENCE_IMPLEMENTATIONS],
            requirements,
            unsupported=self.backend.capabilities.unsupported,
            make_contiguous=self.make_contiguous(),
        )

    def make_contiguous(self) -> MakeContiguous | None:
        """Puts views right for own kernels that need contiguous tensors; None rejects those."""
        return None

    def fallback(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - any operation
        """The reference's answer to an operation, for comparison and bring-up."""
        references = {found.operation: found.function for found in REFERENCE_IMPLEMENTATIONS}
        return references[operation](*arguments)

    def open_rendezvous(self, place: GroupPlace) -> bytes:
        """Called on rank 0 only: opens a meeting point; the bytes travel to the other ranks.

        The meeting point lives until the communicator made from it is closed. The option
        `communicator-host` names this machine's address for ranks on other machines.
        """
        host = self.config.options.get(COMMUNICATOR_HOST, LOOPBACK)
        self._rendezvous = GlooRendezvous.open(place.join_deadline_s, host)
        return self._rendezvous.address

    def create_communicator(
        self, device: Device, place: GroupPlace, rendezvous: bytes
    ) -> Communicator:
        """The collectives of one epoch; blocks until all ranks are there.

        `rendezvous` is what `open_rendezvous` returned on rank 0; a group of one needs none.
        Raises PeerLost or CommunicatorTimeout.
        """
        if place.world_size == 1:
            return SingleRankCommunicator()
        return self.connect_ranks(device, place, self._meet(place, rendezvous))

    def connect_ranks(
        self, device: Device, place: GroupPlace, rendezvous: GlooRendezvous
    ) -> Communicator:
        """The communicator of ranks that have met; overridden where there is a faster one."""
        return GlooCommunicator(
            device,
            place.rank,
            place.world_size,
            place.key,
            rendezvous,
            join_deadline_s=place.join_deadline_s,
            step_deadline_s=place.step_deadline_s,
        )

    def collectives(self) -> str:
        """What carries the collectives of this process's ranks, and why; for people."""
        return "gloo, over TCP"

    def _meet(self, place: GroupPlace, rendezvous: bytes) -> GlooRendezvous:
        hosted = self._rendezvous
        # An attempt given up meanwhile must not take the meeting point of the next epoch.
        if hosted is not None and hosted.address == rendezvous:
            self._rendezvous = None
            return hosted
        return GlooRendezvous.join(rendezvous, place.join_deadline_s)

    def dtype(self) -> torch.dtype:
        """The dtype to compute in: the configured one, or the backend's own choice for `auto`.

        Raises BackendUnavailable if the backend does not declare the configured one.
        """
        known = self.backend.capabilities.dtypes
        name = known[0] if self.config.dtype == "auto" else self.config.dtype
        if name not in known:
            raise BackendUnavailable(f"dtype is {name!r}; choose {', '.join(known)} or auto")
        found = getattr(torch, name)
        assert isinstance(found, torch.dtype)
        return found


def open_runtime(backend: Backend, config: BackendConfig) -> BackendRuntime:
    """Imports the backend's runtime; call after `on_init`. Raises IncompatibleBackend."""
    runtime_class = load_object(backend.runtime_module)
    if not (isinstance(runtime_class, type) and issubclass(runtime_class, BackendRuntime)):
        raise IncompatibleBackend(f"{backend.runtime_module!r} is not a BackendRuntime class")
    return runtime_class(backend, config)
