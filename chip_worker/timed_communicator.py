"""A communicator that measures how long this rank waits for the others."""

from collections.abc import Callable
from time import perf_counter_ns

import torch
from typing_extensions import override

from backends.errors import CommunicatorError
from backends.interface import Communicator, ForwardingCommunicator, Work
from backends.native_call import NativeCall


class TimedCommunicator(ForwardingCommunicator):
    """Passes everything on to `inner`; `waited_ns` grows by the time spent in calls and waits."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._called_ns = 0

    @property
    def waited_ns(self) -> int:
        """From Python and from captured programs."""
        return self._called_ns + self._inner.native_calls_ns

    def add(self, called_ns: int) -> None:
        """A call or wait took so long."""
        self._called_ns += called_ns

    @override
    def native_all_reduce(self, tensor: torch.Tensor) -> NativeCall | None:
        return self._inner.native_all_reduce(tensor)

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._submit(lambda: self._inner.all_reduce(tensor))

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        return self._submit(lambda: self._inner.all_gather(tensor, output))

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        return self._submit(lambda: self._inner.reduce_scatter(tensor, output))

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._submit(lambda: self._inner.broadcast(tensor, root))

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._submit(lambda: self._inner.send(tensor, peer))

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        return self._submit(lambda: self._inner.receive(tensor, peer))

    def _submit(self, call: Callable[[], Work]) -> Work:
        started_ns = perf_counter_ns()
        work = call()
        self.add(perf_counter_ns() - started_ns)
        return _TimedWork(work, self)


class _TimedWork(Work):
    """Work whose host waits count for its communicator."""

    def __init__(self, inner: Work, communicator: TimedCommunicator) -> None:
        self._inner = inner
        self._communicator = communicator

    @override
    def wait_stream(self) -> None:
        started_ns = perf_counter_ns()
        self._inner.wait_stream()
        self._communicator.add(perf_counter_ns() - started_ns)

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        started_ns = perf_counter_ns()
        self._inner.wait(timeout_s)
        self._communicator.add(perf_counter_ns() - started_ns)

    @override
    def done(self) -> bool:
        return self._inner.done()

    @override
    def exception(self) -> CommunicatorError | None:
        return self._inner.exception()
