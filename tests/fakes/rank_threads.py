"""Ranks of a group as threads of one process, with collectives through shared memory."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from backends.communicator import FinishedWork
from backends.errors import CommunicatorTimeout
from backends.interface import Communicator, Work


class Meeting:
    """What the ranks of one group share; `deadline_s` bounds every wait."""

    def __init__(self, world_size: int, deadline_s: float = 20.0) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=deadline_s)
        self.shared: list[torch.Tensor | None] = [None] * world_size
        self.mail: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (sender, receiver): queue.Queue()
            for sender in range(world_size)
            for receiver in range(world_size)
        }
        self.deadline_s = deadline_s


class ThreadCommunicator(Communicator):
    """Collectives between threads: everyone shows its tensor, then everyone reads all of them."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, meeting.world_size)
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._exchange(tensor, lambda parts: tensor.copy_(torch.stack(parts).sum(dim=0)))
        return FinishedWork()

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._exchange(tensor, lambda parts: output.copy_(torch.stack(parts)))
        return FinishedWork()

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._exchange(tensor, lambda parts: output.copy_(torch.stack(parts).sum(dim=0)[self.rank]))
        return FinishedWork()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._exchange(tensor, lambda parts: tensor.copy_(parts[root]))
        return FinishedWork()

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        assert tensor.is_contiguous()
        self._meeting.mail[self.rank, peer].put(tensor.clone())
        return FinishedWork()

    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        try:
            sent = self._meeting.mail[peer, self.rank].get(timeout=self._meeting.deadline_s)
        except queue.Empty as error:
            raise CommunicatorTimeout("another rank did not send") from error
        assert sent.shape == tensor.shape, "sender and receiver brought different shapes"
        tensor.copy_(sent)
        return FinishedWork()

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def _exchange(self, tensor: torch.Tensor, read: Callable[[list[torch.Tensor]], object]) -> None:
        assert tensor.is_contiguous()
        meeting = self._meeting
        meeting.shared[self.rank] = tensor.clone()
        try:
            meeting.barrier.wait()
            parts = [part for part in meeting.shared if part is not None]
            assert len({part.shape for part in parts}) == 1, "ranks brought different shapes"
            read(parts)
            meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommunicatorTimeout("another rank did not come") from error


def run_ranks(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs one function per rank at the same time and returns their results."""
    with ThreadPoolExecutor(max_workers=len(functions)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(f) for f in functions]]
