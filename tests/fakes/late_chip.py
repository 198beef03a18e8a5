"""A chip whose memory nobody but its own work can read or write: what is seen of it is poison.

    a tensor the caller holds   poison, whatever is done to it        the tensor's true contents
    kernels, copies, collectives, to_host  ------------------------------------^

An eager operation on a chip tensor therefore reads poison, or writes where nobody looks, as on a
chip whose work is done later than it is asked for.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from backends.cpu.host import CpuChip
from backends.cpu.kernel_library import FORMS, Engine, PackedMatrix
from backends.cpu.plugin import CpuBackend
from backends.cpu.runtime import CpuRuntime
from backends.interface import BackendConfig, Communicator, Device, GroupPlace, Matrix, Work
from backends.plugin import ChipDescription
from backends.weight_form import WeightForm
from kernels.spec import BoundKV, Implementation
from tests.fakes.compute_group import ThreadRuntime

POISON = 0x7F
"""In every dtype a large number: as an index it is out of range."""


class LateDevice(Device):
    """Keeps the true contents of every storage it gave out; host tensors are as they are."""

    def __init__(self, chip: ChipDescription, engine: Engine | None) -> None:
        super().__init__(chip)
        self._engine = engine
        self._contents: dict[int, torch.UntypedStorage] = {}

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.hide(torch.empty(tuple(shape), dtype=dtype))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.truth(target).copy_(self.truth(source))

    @property
    def weight_forms(self) -> frozenset[WeightForm]:
        """Those of the native kernels, where there is an engine."""
        return super().weight_forms if self._engine is None else frozenset(FORMS)

    def allocate_matrix(
        self, shape: Sequence[int], dtype: torch.dtype, form: WeightForm = WeightForm.PLAIN
    ) -> Matrix:
        """Packed, and so as closed to others as it is."""
        if self._engine is None:
            return super().allocate_matrix(shape, dtype, form)
        return PackedMatrix(self._engine, shape, dtype, form)

    def write_rows(self, matrix: Matrix, first: int, rows: torch.Tensor) -> None:
        if isinstance(matrix, PackedMatrix):
            matrix.write(first, self.truth(rows))
        else:
            super().write_rows(matrix, first, rows)

    def write_blocks(
        self, matrix: Matrix, first: int, blocks: torch.Tensor, form: WeightForm
    ) -> None:
        assert isinstance(matrix, PackedMatrix), "only packed matrices take blocks"
        matrix.write_blocks(first, self.truth(blocks), form)

    def read_rows(self, matrix: Matrix, rows: Sequence[int]) -> torch.Tensor:
        if isinstance(matrix, PackedMatrix):
            return matrix.read(torch.tensor(rows, dtype=torch.int64))
        return super().read_rows(matrix, rows)

    def hide(self, contents: torch.Tensor) -> torch.Tensor:
        """A tensor like `contents`, which it stands for, full of poison."""
        storage = contents.untyped_storage()
        seen = torch.full((storage.nbytes(),), POISON, dtype=torch.uint8).untyped_storage()
        address = seen.data_ptr()
        self._contents[address] = storage
        weakref.finalize(seen, self._contents.pop, address).atexit = False
        return _like(contents, seen)

    def truth(self, value: Any) -> Any:
        """What is behind chip tensors, in tuples and bound caches too; all else as it is."""
        if isinstance(value, torch.Tensor):
            contents = self._contents.get(value.untyped_storage().data_ptr())
            return value if contents is None else _like(value, contents)
        if isinstance(value, tuple):
            return tuple(map(self.truth, value))
        if isinstance(value, BoundKV):
            assert dataclasses.is_dataclass(value)
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return type(value)(**{name: self.truth(each) for name, each in fields.items()})
        return value

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Calls a kernel on the true contents; what it returns is hidden."""
        found = function(*map(self.truth, arguments))
        if isinstance(found, tuple):
            return tuple(map(self.hide, found))
        return found if found is None else self.hide(found)


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class LateCommunicator(Communicator):
    """Another communicator, over the true contents."""

    def __init__(self, inner: Communicator, device: LateDevice) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner
        self._device = device

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._inner.all_reduce(self._device.truth(tensor))

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        return self._inner.all_gather(self._device.truth(tensor), self._device.truth(output))

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        return self._inner.reduce_scatter(self._device.truth(tensor), self._device.truth(output))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._inner.broadcast(self._device.truth(tensor), root)

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._inner.send(self._device.truth(tensor), peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._inner.receive(self._device.truth(tensor), peer)

    def abort(self) -> None:
        self._inner.abort()


class LateRuntime(ThreadRuntime):
    """The cpu backend's kernels on such a chip, collectives between threads."""

    def __init__(self, backend: CpuBackend, config: BackendConfig) -> None:
        super().__init__(backend, config)
        self._late: LateDevice | None = None

    def open_device(self, chip: ChipDescription) -> Device:
        assert isinstance(chip, CpuChip)
        self._engine = self._open_engine(len(chip.cores))
        self._late = LateDevice(chip, self._engine)
        return self._late

    def create_communicator(
        self, device: Device, place: GroupPlace, rendezvous: bytes
    ) -> Communicator:
        assert isinstance(device, LateDevice)
        return LateCommunicator(super().create_communicator(device, place, rendezvous), device)

    def implementations(self) -> Sequence[Implementation]:
        return [
            dataclasses.replace(each, function=self._hidden(each.function))
            for each in CpuRuntime.implementations(self)
        ]

    def _hidden(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self._late is not None
            return self._late.run(function, arguments)

        return call
