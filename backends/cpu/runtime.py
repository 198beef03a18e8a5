"""The cpu backend once torch is there: opens sets of cores and offers faster kernels."""

from collections.abc import Sequence

from typing_extensions import override

from backends.cpu.device import CpuDevice
from backends.cpu.host import CpuChip
from backends.cpu.kernels import CPU_IMPLEMENTATIONS
from backends.device import Device
from backends.errors import BackendUnavailable
from backends.interface import BackendRuntime
from backends.plugin import ChipDescription
from kernels.spec import Implementation


class CpuRuntime(BackendRuntime):
    """Everything but the device and the kernels is the default."""

    @override
    def open_device(self, chip: ChipDescription) -> Device:
        if not isinstance(chip, CpuChip):
            raise BackendUnavailable(f"chip {chip.index} is not a set of cores: {chip}")
        return CpuDevice(chip, self.config.memory_limit_bytes)

    @override
    def implementations(self) -> Sequence[Implementation]:
        return CPU_IMPLEMENTATIONS
