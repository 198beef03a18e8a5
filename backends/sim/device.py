"""A simulated chip as a device: memory on it, copies in order with its kernels, fences."""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from typing_extensions import override

from backends.device import CapturedProgram, Device, EagerProgram, Fence, MemoryInfo
from backends.errors import OutOfMemory, UnsupportedOperation
from backends.plugin import ChipDescription
from backends.scratch import Lifetime
from backends.sim.driver import SimDriver
from backends.simulator.chip import SimulatedChip


class RecordedProgram(CapturedProgram):
    """Launches that were recorded instead of asked for, with the memory they work on."""

    def __init__(self, launches: Sequence[Callable[[], None]]) -> None:
        self._launches = tuple(launches)

    @override
    def replay(self) -> None:
        """Asks for all of them; returns before they are done."""
        for launch in self._launches:
            launch()


class SimDevice(Device):
    """Tensors are views of the chip's memory: contents come late and are never read directly.

    closing: called with the device, once, when it is closed.
    """

    def __init__(
        self,
        chip: ChipDescription,
        simulated: SimulatedChip,
        decode_rows_max: int | None = None,
        closing: "Callable[[SimDevice], None]" = lambda _: None,
    ) -> None:
        super().__init__(chip)
        self.simulated = simulated
        self.driver = SimDriver(simulated, decode_rows_max)
        self._profile = simulated.profile
        self._closing = closing
        self._live_bytes = 0

    # ------------------------------------------------------------ memory

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that was freed is the chip's again once its work is done with it."""
        asked_bytes = math.prod(shape) * dtype.itemsize
        # A chip that reports running out of memory too late is asked beforehand.
        if self._profile.deferred_out_of_memory.value:
            free_bytes = self.simulated.memory_info().free_bytes
            if asked_bytes > free_bytes:
                raise self._out_of_memory(shape, asked_bytes, f"{free_bytes} bytes are free")
        try:
            tensor = self.simulated.allocate_tensor(shape, dtype)
        except OutOfMemory as error:
            raise self._out_of_memory(shape, asked_bytes, str(error)) from error
        self._live_bytes += asked_bytes
        weakref.finalize(tensor.untyped_storage(), self._forget, asked_bytes).atexit = False
        return tensor

    def _forget(self, freed_bytes: int) -> None:
        self._live_bytes -= freed_bytes

    def _out_of_memory(self, shape: Sequence[int], asked_bytes: int, why: str) -> OutOfMemory:
        return OutOfMemory(
            f"{asked_bytes} bytes asked for a tensor of {tuple(shape)}; {why}; "
            f"{self._live_bytes} bytes are in use on chip {self.chip.index}, which has "
            f"{self._profile.memory_bytes.value}"
        )

    @override
    def memory_info(self) -> MemoryInfo:
        """What the kernels keep per shape counts as used."""
        return self.simulated.memory_info()

    @override
    def reclaim(self, lifetime: Lifetime) -> None:
        """With a request or a model end the buffers that kernels keep per shape.

        Not with a step: the next one has much the same shapes. A leak that a fault script plants
        is what no call can free.
        """
        if lifetime is Lifetime.STEP:
            return
        for operation in self.simulated.workspaces.bytes_by_operation():
            if not self.simulated.faults.leaks(operation):
                self.simulated.release_workspaces(operation)

    # ------------------------------------------------------------ order

    @override
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """From the host through a staging buffer, so that `source` may change at once."""
        from_chip, to_chip = self.simulated.owns(source), self.simulated.owns(target)
        if from_chip and to_chip:
            self.driver.submit(partial(self.simulated.copy_on_chip, source, target))
        elif to_chip:
            self._check_not_recording("a copy from the host")
            staged = source.detach().to(target.dtype, copy=True)
            self.simulated.copy_from_host(staged, target)
            if self._profile.stale_reads_after_async_copy.value:
                self.simulated.fence()
        elif from_chip:
            self._check_not_recording("a copy to the host")
            self.simulated.copy_to_host(source, target)
        else:
            target.copy_(source)

    @override
    def fence(self) -> Fence:
        """Behind kernels and copies; collectives have their own `Work`."""
        self._check_not_recording("a fence")
        return self.simulated.fence()

    @override
    def capture(self, function: Callable[[], None]) -> CapturedProgram:
        """Runs `function` without carrying anything out; what it allocates lives as long."""
        if not self._profile.can_capture.value:
            return EagerProgram(function)
        return RecordedProgram(self.driver.record(function))

    def _check_not_recording(self, what: str) -> None:
        if self.driver.recording:
            raise UnsupportedOperation(f"{what} cannot be captured; do it before the capture")

    @override
    def close(self) -> None:
        self._closing(self)

    # ------------------------------------------------------------ what kernels want

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy without gaps where the kernels misread one with gaps."""
        return self.without_gaps(tensor) if self._profile.contiguous_only.value else tensor

    def without_gaps(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy if it has gaps."""
        if tensor.is_contiguous():
            return tensor
        copied = self.allocate(tensor.shape, tensor.dtype)
        self.copy(tensor, copied)
        return copied

    def indices(self, tensor: torch.Tensor) -> torch.Tensor:
        """Indices as the kernels want them."""
        if tensor.dtype == torch.int32 or not self._profile.int32_indices_only.value:
            return self.contiguous(tensor)
        narrow = self.allocate(tensor.shape, torch.int32)
        self.copy(tensor, narrow)
        return narrow
