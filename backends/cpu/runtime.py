"""The cpu backend once torch is there: sets of cores, faster kernels, collectives in memory."""

import logging
from collections.abc import Sequence
from functools import cache

from typing_extensions import override

from backends.cpu.device import CpuDevice
from backends.cpu.host import CpuChip
from backends.cpu.kernel_library import Engine
from backends.cpu.kernels import cpu_implementations
from backends.cpu.options import COLLECTIVES, KERNELS, chosen
from backends.cpu.shared_memory_end import SharedMemorySettings
from backends.cpu.shared_memory_join import Refusal, join_shared_memory
from backends.cpu.shared_memory_library import Library
from backends.device import Device
from backends.errors import BackendUnavailable
from backends.gloo_rendezvous import GlooRendezvous
from backends.interface import BackendRuntime, Communicator, GroupPlace
from backends.plugin import Backend, BackendConfig, ChipDescription
from kernels.spec import Implementation

_log = logging.getLogger(__name__)


class CpuRuntime(BackendRuntime):
    """Collectives go through shared memory; over gloo where the ranks share none.

    The option `collectives` says which: auto (default), shared-memory (or fail) or gloo. It must be
    the same on every rank. The option `kernels` says what computes: auto (default), torch alone, or
    the native kernels with at most these instructions: portable, avx2, avx512, amx.
    """

    def __init__(self, backend: Backend, config: BackendConfig) -> None:
        super().__init__(backend, config)
        self._engine: Engine | None = None

    @override
    def open_device(self, chip: ChipDescription) -> Device:
        if not isinstance(chip, CpuChip):
            raise BackendUnavailable(f"chip {chip.index} is not a set of cores: {chip}")
        self._engine = self._open_engine(len(chip.cores))
        return CpuDevice(chip, self.config.memory_limit_bytes, self._engine)

    @override
    def implementations(self) -> Sequence[Implementation]:
        # Also asked what it would choose, without a chip.
        engine = self._engine or self._open_engine(1)
        return cpu_implementations(lambda: self.get_device(0).scratch, engine)

    def _open_engine(self, threads: int) -> Engine | None:
        wanted = chosen(self.config.options, KERNELS)
        if wanted == "torch":
            return None
        try:
            return Engine(threads, "" if wanted == "auto" else wanted)
        except BackendUnavailable as error:
            if wanted != "auto":
                raise
            _warn_once(str(error))
            return None

    @override
    def connect_ranks(
        self, device: Device, place: GroupPlace, rendezvous: GlooRendezvous
    ) -> Communicator:
        choice = chosen(self.config.options, COLLECTIVES)
        if choice == "gloo":
            return super().connect_ranks(device, place, rendezvous)
        joined = join_shared_memory(place, rendezvous, Library, SharedMemorySettings())
        if not isinstance(joined, Refusal):
            return joined
        if choice == "shared-memory":
            raise BackendUnavailable(f"the ranks share no memory: {joined.reason}")
        if place.rank == 0:
            _log.warning("%s: gloo carries the collectives: %s", place.key, joined.reason)
        return super().connect_ranks(device, place, rendezvous)

    @override
    def collectives(self) -> str:
        if chosen(self.config.options, COLLECTIVES) == "gloo":
            return "gloo, over TCP: the option collectives says so"
        try:
            Library()
        except BackendUnavailable as error:
            return f"gloo, over TCP: {error}"
        return "shared memory, gloo between ranks that share none"


@cache
def _warn_once(why: str) -> None:
    _log.warning("torch computes everything, which is slower: %s", why)
