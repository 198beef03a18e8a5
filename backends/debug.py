"""Wraps any backend so that each call of a primitive is recorded; see `backends.debug_records`.

    worker ──▶ DebugRuntime ──▶ the backend's own runtime
                 │ hands out devices, pools, kernels and communicators that record
                 └──▶ DebugLog

Without it nothing is wrapped. What the backend does within a call, it does with its own objects.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from backends.communicator import Communicator
from backends.debug_proxies import (
    CREATE_COMMUNICATOR,
    CREATE_MEMORY_POOL,
    debug_communicator,
    debug_device,
    debug_memory_pool,
    primitives,
)
from backends.debug_records import BackendCall, DebugLog
from backends.device import Device
from backends.gloo_rendezvous import GlooRendezvous
from backends.interface import AcquiredDevices, BackendRuntime, GroupPlace
from backends.kernel_table import KernelTable, MakeContiguous
from backends.memory import KVLayout, KVSpec, MemoryPool
from backends.plugin import ChipDescription
from kernels.spec import Choice, Implementation, Requirement

__all__ = ["BackendCall", "DebugLog", "DebugRuntime"]


class DebugRuntime(BackendRuntime):
    """A runtime that passes everything on to `inner` and records what is done with what it gives.

    Raises BackendError if the log's pattern selects nothing there is.
    """

    def __init__(self, inner: BackendRuntime, log: DebugLog) -> None:
        log.check_pattern(primitives())
        super().__init__(inner.backend, inner.config)
        self.log = log
        self._inner = inner
        self._inner_devices: dict[Device, Device] = {}

    @override
    def open_device(self, chip: ChipDescription) -> Device:
        return self._debugged(self._inner.open_device(chip))

    @override
    def acquire(self, count: int) -> AcquiredDevices:
        acquired = self._inner.acquire(count)
        granted = tuple(self._debugged(device) for device in acquired.granted)
        self._devices = granted
        return AcquiredDevices(granted, acquired.rejected)

    @override
    def get_device(self, local_rank: int) -> Device:
        return self._devices[local_rank]

    @override
    def kv_layout(self, spec: KVSpec) -> KVLayout:
        return self._inner.kv_layout(spec)

    @override
    def create_memory_pool(self, device: Device, spec: KVSpec, capacity: int) -> MemoryPool:
        own = self._own(device)
        pool: MemoryPool = self.log.call(
            "memory", CREATE_MEMORY_POOL, self._inner.create_memory_pool, (own, spec, capacity)
        )
        return debug_memory_pool(pool, self.log)

    @override
    def implementations(self) -> Sequence[Implementation]:
        return self._inner.implementations()

    @override
    def bind_kernels(self, requirements: Mapping[str, Requirement]) -> KernelTable:
        return self._inner.bind_kernels(requirements).wrapped(self._recorded)

    @override
    def make_contiguous(self) -> MakeContiguous | None:
        return self._inner.make_contiguous()

    @override
    def fallback(self, operation: str, *arguments: Any) -> Any:
        return self._inner.fallback(operation, *arguments)

    @override
    def open_rendezvous(self, place: GroupPlace) -> bytes:
        return self._inner.open_rendezvous(place)

    @override
    def create_communicator(
        self, device: Device, place: GroupPlace, rendezvous: bytes
    ) -> Communicator:
        communicator: Communicator = self.log.call(
            "collectives",
            CREATE_COMMUNICATOR,
            self._inner.create_communicator,
            (self._own(device), place, rendezvous),
        )
        return debug_communicator(communicator, self.log)

    @override
    def connect_ranks(
        self, device: Device, place: GroupPlace, rendezvous: GlooRendezvous
    ) -> Communicator:
        return self._inner.connect_ranks(self._own(device), place, rendezvous)

    @override
    def collectives(self) -> str:
        return self._inner.collectives()

    @override
    def dtype(self) -> torch.dtype:
        return self._inner.dtype()

    def _debugged(self, device: Device) -> Device:
        self.log.stream_of_chip = device.stream_name
        wrapped = debug_device(device, self.log)
        self._inner_devices[wrapped] = device
        return wrapped

    def _own(self, device: Device) -> Device:
        """The backend's own device, which alone it knows what to do with."""
        return self._inner_devices.get(device, device)

    def _recorded(self, choice: Choice, function: Callable[..., Any]) -> Callable[..., Any]:
        log = self.log

        def recorded(*arguments: Any) -> Any:  # noqa: ANN401 - any operation
            return log.call(
                "kernels",
                choice.operation,
                function,
                arguments,
                choice.implementation,
                choice.reason,
            )

        return recorded
