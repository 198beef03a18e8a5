"""The sim backend once torch is there: opens simulated chips and offers their vendor's kernels."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from backends.communicator import Communicator
from backends.device import Device
from backends.errors import BackendUnavailable
from backends.gloo_rendezvous import GlooRendezvous
from backends.interface import BackendRuntime, GroupPlace
from backends.plugin import Backend, BackendConfig, ChipDescription
from backends.sim.communicator import (
    AloneCommunicator,
    StagedCommunicator,
    in_one_process,
    join_fabric,
)
from backends.sim.device import SimDevice
from backends.sim.kernels import SimKernels
from backends.sim.open_devices import OpenDevices
from backends.sim.options import parse_options
from backends.sim.plugin import SimBackend, SimChip
from backends.simulator.chip import SimulatedChip
from backends.simulator.clock import VirtualClock, WallClock
from backends.simulator.faults import ChipFaults, parse_faults
from backends.simulator.profile import PROFILES, Profile, sourced
from kernels.spec import Implementation

STAGE_DEADLINE_S = 10.0
"""How long a chip may take, in virtual time, to open or to be made ready for a model. In real time
one that hangs hangs for good, and whoever waits for it has a deadline of his own."""


class SimRuntime(BackendRuntime):
    """Chips of one process, each with the clock of the host thread that drives it."""

    def __init__(self, backend: Backend, config: BackendConfig) -> None:
        super().__init__(backend, config)
        assert isinstance(backend, SimBackend), f"{backend} is not the sim backend"
        self._sim = backend
        self._options = parse_options(config.options)
        self._open = OpenDevices()
        self._implementations = SimKernels(self._open).implementations(
            PROFILES[backend.variant], self.fallback
        )

    @override
    def open_device(self, chip: ChipDescription) -> Device:
        """Raises DeviceError or DeviceHung where a fault script says so."""
        if not isinstance(chip, SimChip):
            raise BackendUnavailable(f"chip {chip.index} is not a simulated one: {chip}")
        options = self._options
        simulated = SimulatedChip(
            self._profile(chip),
            chip.index,
            WallClock() if options.pace else VirtualClock(),
            options.seed,
            options.execution,
            faults=ChipFaults(parse_faults(options.faults), chip.index),
            die=_die if options.pace else None,
        )
        deadline_s = None if options.pace else STAGE_DEADLINE_S
        simulated.pass_stage("open", deadline_s)
        # Main memory and cores stand for all chips of the host together.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.config.chips_on_host))
        load = partial(simulated.pass_stage, "load", deadline_s)
        device = SimDevice(chip, simulated, options.decode_rows_max, closing=self._closed)
        self._open.add(device)
        self._sim.opened[device] = load
        return device

    def _closed(self, device: SimDevice) -> None:
        self._open.remove(device)
        del self._sim.opened[device]

    def _profile(self, chip: SimChip) -> Profile:
        """The variant's, with the memory that chip, options and limit leave."""
        profile = PROFILES[self.backend.variant]
        limit_bytes = self.config.memory_limit_bytes
        memory_bytes = chip.memory_bytes
        if limit_bytes is not None:
            memory_bytes = min(memory_bytes, limit_bytes)
        return replace(profile, memory_bytes=sourced(memory_bytes, "the options of the backend"))

    @override
    def implementations(self) -> Sequence[Implementation]:
        return self._implementations

    @override
    def create_communicator(
        self, device: Device, place: GroupPlace, rendezvous: bytes
    ) -> Communicator:
        if place.world_size == 1:
            return AloneCommunicator(device)
        return super().create_communicator(device, place, rendezvous)

    @override
    def connect_ranks(
        self, device: Device, place: GroupPlace, rendezvous: GlooRendezvous
    ) -> Communicator:
        """Over the fabric where all ranks are threads of this process."""
        assert isinstance(device, SimDevice), f"{device} is not a simulated chip"
        if in_one_process(place, rendezvous):
            return join_fabric(device, place, rendezvous)
        host = super().connect_ranks(device, place, rendezvous)
        return StagedCommunicator(device, host, place.step_deadline_s)

    @override
    def collectives(self) -> str:
        return "the simulator's fabric between threads of a process, else gloo through the host"


def _die() -> None:
    """As a process dies that its chip takes along: at once, with no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)
