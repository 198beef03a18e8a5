"""A simulated chip: memory, kernels, copies and faults behind calls that return before the work.

host call -> engine (streams; late, early or by chance) -> bytes of the chip's memory
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from backends.device import MemoryInfo
from backends.errors import DeviceError, OutOfMemory
from backends.simulator.allocations import Allocations
from backends.simulator.clock import Clock
from backends.simulator.engine import Engine, Execution
from backends.simulator.faults import ChipFaults
from backends.simulator.kernel_rules import gets_wrong, spoil
from backends.simulator.memory import MemoryMisuse, Region
from backends.simulator.profile import Profile
from backends.simulator.statistics import Statistics
from backends.simulator.streams import Operation, Rendezvous, Stream
from backends.simulator.workspaces import Workspaces


class SimulatedChip(Engine):
    """One chip. After an error that sticks every call raises DeviceLost.

    clock: the time of the host thread that drives the chip. die: ends the process where a fault
    script says so; without it the chip is lost and its peers see it gone.
    """

    def __init__(
        self,
        profile: Profile,
        index: int,
        clock: Clock,
        seed: int = 0,
        execution: Execution = "latest",
        *,
        faults: ChipFaults | None = None,
        die: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(profile, index, clock, seed, execution)
        self.faults = faults or ChipFaults()
        self._die = die
        self._allocations = Allocations(self)

    # ------------------------------------------------------------ memory

    def allocate(self, size: int) -> Region:
        """So many bytes or a few more, poisoned; the caller frees them.

        Raises OutOfMemory, or has the next synchronization raise it where the chip defers that.
        """
        with self.lock:
            self.check_alive()
            if self._count("allocate") == "oom":
                error = OutOfMemory(f"{size} bytes asked: scripted fault")
                return self._allocations.refuse(size, error)
            return self._allocations.allocate(size)

    def allocate_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A poisoned tensor; its memory is freed once neither the caller nor the chip uses it.

        Raises like `allocate`, and UnsupportedOperation for a dtype the chip does not have.
        """
        region = self.allocate(self._allocations.size_bytes(shape, dtype))
        return self._allocations.view(region, shape, dtype)

    def free(self, region: Region) -> None:
        """Gives memory back once the work asked for so far is done with it.

        Where the chip cannot do that in order with its work, the host waits. Raises MemoryMisuse
        for what is not allocated.
        """
        with self.lock:
            self.check_alive()
            self._allocations.check(region)
            users = self.users_of(region.address)
        if users and not self.profile.async_allocate.value:
            self.reach(users)
        with self.lock:
            self._allocations.release(region)

    def memory_info(self) -> MemoryInfo:
        """Total bytes and free ones, in however many pieces; hidden workspaces count as used."""
        with self.lock:
            self.check_alive()
            return self._allocations.info()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in this chip's memory, and not freed."""
        with self.lock:
            try:
                self._allocations.addresses((tensor,))
            except MemoryMisuse:
                return False
            return True

    @property
    def workspaces(self) -> Workspaces:
        """The hidden buffers of the chip's kernels."""
        return self._allocations.workspaces

    def release_workspaces(self, operation: str | None = None) -> None:
        """Frees the hidden buffers of an operation's kernels, or of all."""
        for region in self.workspaces.take_out(operation):
            self.free(region)

    # ------------------------------------------------------------ work

    def launch(
        self,
        name: str,
        function: Callable[[], None],
        *,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
        seconds: float = 0.0,
        stream: Stream | None = None,
        rows: int = 0,
        wrong: Callable[[], None] | None = None,
    ) -> None:
        """Asks for a kernel: `function` does its arithmetic on this chip's memory, later.

        Every tensor it touches is named in `reads` or `writes`. rows: what the profile's limit of
        right results is about. wrong: what runs instead where a fault makes the results wrong; None
        spoils all of `writes` afterwards.
        """
        inputs, outputs = tuple(reads), tuple(writes)
        with self.lock:
            self.check_alive()
            regions = self._allocations.addresses((*inputs, *outputs))
            if self.profile.workspace_per_shape.value or self.faults.leaks(name):
                self._allocations.keep_workspace(name, (*inputs, *outputs))
            fault = self._count("launch")
            if self.faults.is_wrong(name) or gets_wrong(self.profile, rows):
                function = wrong or partial(_run_wrongly, function, outputs)
            self.recorder.launches += 1
            operation = self.operation(name, function, seconds * self.faults.slowness(), stream)
            operation.regions = regions
            operation.fault = fault
            self.enqueue(operation)
        self.limit_queue(operation.stream)

    def copy_from_host(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        blocking: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """Copies to the chip. Async: `source` is read later, so it must not change until then.

        Kernels see an async copy at once or, where the copy engine bypasses the cache, after the
        stream's next fence or blocking copy; what they write there before that is lost.
        """
        stale = self.profile.stale_reads_after_async_copy.value and not blocking
        queue = stream or self.default_stream

        def write() -> None:
            if stale:
                queue.unseen.append((target, source.to(target.dtype, copy=True)))
            else:
                # In order with the copies before it, which would else come on top of it.
                queue.show_copies()
                target.copy_(source)

        self._copy("copy_from_host", write, (target,), source, queue, blocking=blocking)

    def copy_to_host(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        blocking: bool = False,
        stream: Stream | None = None,
    ) -> None:
        """Copies to the host. Async: `target` holds its old contents until the copy is done."""
        queue = stream or self.default_stream

        def read() -> None:
            # The copy engine reads memory, not the cache: it sees what it wrote there itself.
            covered = [(seen, seen.clone()) for seen, _ in queue.unseen]
            for seen, staged in queue.unseen:
                seen.copy_(staged)
            target.copy_(source)
            for seen, old in reversed(covered):
                seen.copy_(old)

        self._copy("copy_to_host", read, (source,), source, queue, blocking=blocking)

    def copy_on_chip(
        self, source: torch.Tensor, target: torch.Tensor, *, stream: Stream | None = None
    ) -> None:
        """Copies within the chip's memory, in order with its kernels."""
        moved = 2 * source.numel() * source.element_size()
        self.launch(
            "copy",
            partial(_copy_into, target, source),
            reads=(source,),
            writes=(target,),
            seconds=self.profile.seconds(moved_bytes=moved),
            stream=stream,
        )

    def copy_from_peer(
        self,
        peer: "SimulatedChip",
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        stream: Stream | None = None,
    ) -> None:
        """Copies from another chip's memory: what that chip was asked to write is seen after its
        fence, and before that its bytes may be the old ones.
        """
        if not peer.owns(source):
            raise MemoryMisuse(f"the source of the copy is not in the memory of chip {peer.index}")
        moved = source.numel() * source.element_size()
        self.launch(
            "copy_from_peer",
            partial(_copy_into, target, source),
            writes=(target,),
            seconds=moved / self.profile.link_bytes_per_s.value,
            stream=stream,
        )

    def ask_collective(
        self, name: str, rendezvous: Rendezvous, tensors: Iterable[torch.Tensor], stream: Stream
    ) -> Operation:
        """Asks for this chip's part of a collective, behind what the default stream has so far."""
        with self.lock:
            self.check_alive()
            regions = self._allocations.addresses(tensors)
            fault = self._count("collective")
            self.recorder.collectives += 1
            before = self.record(self.default_stream)
            operation = self.operation(name, None, 0.0, stream)
            operation.kind = "collective"
            operation.after = (before.mark,)
            operation.regions = regions
            operation.rendezvous = rendezvous
            operation.fault = fault
            return operation

    # ------------------------------------------------------------ statistics and faults

    def statistics(self) -> Statistics:
        """What the chip has carried out so far."""
        with self.lock:
            return self.recorder.statistics()

    def pass_stage(self, stage: str, timeout_s: float | None = None) -> None:
        """Lets the fault script strike at `open`, `probe_collective` or `load`.

        Raises DeviceError or, where the chip hangs, DeviceHung after `timeout_s`.
        """
        fault = self.faults.at_stage(stage)
        if fault == "fail":
            raise DeviceError(f"chip {self.index} fails at {stage}: scripted fault")
        if fault == "hang":
            limit_s = None if timeout_s is None else self.clock.now_s + timeout_s
            raise self.hung(stage, limit_s)
        if fault == "death":
            self._end()

    def _count(self, point: str) -> str | None:
        fault = self.faults.count(point)
        if fault == "death":
            self._end()
        return fault

    def _end(self) -> None:
        if self._die is not None:
            self._die()
        self.lose(DeviceError(f"chip {self.index} died: scripted fault"))
        self.check_alive()

    def _copy(
        self,
        name: str,
        function: Callable[[], None],
        on_chip: tuple[torch.Tensor, ...],
        source: torch.Tensor,
        stream: Stream,
        *,
        blocking: bool,
    ) -> None:
        moved = source.numel() * source.element_size()
        with self.lock:
            self.check_alive()
            regions = self._allocations.addresses(on_chip)
            fault = self._count("copy")
            self.recorder.copies += 1
            self.recorder.copied_bytes += moved
            seconds = moved / self.profile.host_link_bytes_per_s.value
            operation = self.operation(name, function, seconds, stream)
            operation.regions = regions
            operation.fault = fault
            self.enqueue(operation)
        if blocking:
            self.reach([operation])
        else:
            self.limit_queue(stream)


def _run_wrongly(function: Callable[[], None], outputs: Sequence[torch.Tensor]) -> None:
    function()
    for output in outputs:
        spoil(output)


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
