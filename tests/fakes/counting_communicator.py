"""A communicator that remembers what it was asked for, as one word a call."""

import torch

from backends.interface import Communicator, ForwardingCommunicator, Work


class CountingCommunicator(ForwardingCommunicator):
    """Passes everything on; `calls` holds such as "all_reduce float32 12", "send int64 3 to 1"."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        self._note("all_reduce", tensor)
        return self._inner.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._note("all_gather", tensor)
        return self._inner.all_gather(tensor, output)

    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        self._note("reduce_scatter", tensor)
        return self._inner.reduce_scatter(tensor, output)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._note("broadcast", tensor, f" from {root}")
        return self._inner.broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        self._note("send", tensor, f" to {peer}")
        return self._inner.send(tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        self._note("receive", tensor, f" from {peer}")
        return self._inner.receive(tensor, peer)

    def _note(self, name: str, tensor: torch.Tensor, whom: str = "") -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.calls.append(f"{name} {dtype} {tensor.numel()}{whom}")
