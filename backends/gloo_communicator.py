"""The default communicator: collectives over TCP, made of gloo's point-to-point messages.

Every rank exchanges with every other directly and sums in rank order. That makes results
bit-identical on all ranks, takes one message time where gloo's own ring takes several, and shows
each rank at once that another is gone. Tensors that are not in main memory go through a host copy.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from typing_extensions import override

from backends.communicator import Communicator, FinishedWork, Work
from backends.device import Device
from backends.errors import CommunicatorError
from backends.gloo_rendezvous import GlooRendezvous
from backends.gloo_work import GlooWork, translate_gloo_errors

# gloo keeps a message's tag in 32 bits; messages this far apart are never pending together.
_TAGS = 1 << 30


class GlooCommunicator(Communicator):
    """One process group of its own, never torch's global one.

    An operation must finish within `step_deadline_s` of being submitted.
    """

    def __init__(
        self,
        device: Device,
        rank: int,
        world_size: int,
        key: str,
        rendezvous: GlooRendezvous,
        *,
        join_deadline_s: float,
        step_deadline_s: float,
    ) -> None:
        super().__init__(rank, world_size)
        self._deadline_s = step_deadline_s
        self._device = device
        # Kept because on rank 0 the other ranks still read from it.
        self._rendezvous: GlooRendezvous | None = rendezvous
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._collectives_count = 0
        self._sent_counts = [0] * world_size
        self._received_counts = [0] * world_size
        with translate_gloo_errors(f"rank {rank} of {world_size} joins {key!r}"):
            self._group: Any = _open_group(rank, world_size, key, rendezvous, join_deadline_s)

    @override
    def all_reduce(self, tensor: torch.Tensor) -> Work:
        mine = self._on_host(tensor)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        parts[self.rank] = mine
        sends = dict.fromkeys(self._peers, mine)
        receives = {peer: parts[peer] for peer in self._peers}
        return self._exchange(
            "all_reduce", sends, receives, lambda: self._store(_ordered_sum(parts), tensor)
        )

    @override
    def all_gather(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        mine = self._on_host(tensor)
        gathered = self._on_host(output)
        sends = dict.fromkeys(self._peers, mine)
        receives = {peer: gathered[peer] for peer in self._peers}

        def finish() -> None:
            gathered[self.rank].copy_(mine)
            self._store(gathered, output)

        return self._exchange("all_gather", sends, receives, finish)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, output: torch.Tensor) -> Work:
        mine = self._on_host(tensor)
        parts = [torch.empty_like(mine[self.rank]) for _ in range(self.world_size)]
        parts[self.rank] = mine[self.rank]
        sends = {peer: mine[peer] for peer in self._peers}
        receives = {peer: parts[peer] for peer in self._peers}
        return self._exchange(
            "reduce_scatter", sends, receives, lambda: self._store(_ordered_sum(parts), output)
        )

    @override
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        mine = self._on_host(tensor)
        if root == self.rank:
            return self._exchange("broadcast", dict.fromkeys(self._peers, mine), {}, lambda: None)
        return self._exchange("broadcast", {}, {root: mine}, lambda: self._store(mine, tensor))

    @override
    def send(self, tensor: torch.Tensor, peer: int) -> Work:
        self._check_peer(peer)
        mine = self._on_host(tensor)
        tag = self._sent_counts[peer] % _TAGS * 2 + 1
        self._sent_counts[peer] += 1
        return self._post("send", [(peer, mine, tag)], [], lambda: None)

    @override
    def receive(self, tensor: torch.Tensor, peer: int) -> Work:
        self._check_peer(peer)
        mine = self._on_host(tensor)
        tag = self._received_counts[peer] % _TAGS * 2 + 1
        self._received_counts[peer] += 1
        return self._post("receive", [], [(peer, mine, tag)], lambda: self._store(mine, tensor))

    def _check_peer(self, peer: int) -> None:
        if peer not in self._peers:
            raise CommunicatorError(
                f"rank {self.rank} of {self.world_size} cannot exchange with rank {peer}"
            )

    def _exchange(
        self,
        name: str,
        sends: dict[int, torch.Tensor],
        receives: dict[int, torch.Tensor],
        finish: Callable[[], None],
    ) -> Work:
        """Posts a collective; its number is its tag, odd tags are left to send and receive."""
        tag = self._collectives_count % _TAGS * 2
        self._collectives_count += 1
        return self._post(
            name,
            [(peer, tensor, tag) for peer, tensor in sends.items()],
            [(peer, tensor, tag) for peer, tensor in receives.items()],
            finish,
        )

    def _post(
        self,
        name: str,
        sends: Sequence[tuple[int, torch.Tensor, int]],
        receives: Sequence[tuple[int, torch.Tensor, int]],
        finish: Callable[[], None],
    ) -> Work:
        group = self._group
        if group is None:
            raise CommunicatorError(f"{name}: the communicator is closed or broken")
        if all(tensor.numel() == 0 for _, tensor, _ in (*sends, *receives)):
            finish()
            return FinishedWork()
        try:
            with translate_gloo_errors(name):
                messages = [group.recv([tensor], peer, tag) for peer, tensor, tag in receives]
                messages += [group.send([tensor], peer, tag) for peer, tensor, tag in sends]
        except CommunicatorError:
            self.close()
            raise
        return GlooWork(name, messages, finish, self._deadline_s, on_failure=self.close)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} is not contiguous"
        return tensor if tensor.device.type == "cpu" else self._device.to_host(tensor)

    def _store(self, result: torch.Tensor, target: torch.Tensor) -> None:
        if result is not target:
            self._device.copy(result, target)

    @override
    def abort(self) -> None:
        """Refuses new operations; gloo has no way to end a pending one before its deadline."""
        self.close()

    @override
    def close(self) -> None:
        self._group = None
        self._rendezvous = None


def _open_group(
    rank: int, world_size: int, key: str, rendezvous: GlooRendezvous, deadline_s: float
) -> Any:  # noqa: ANN401 - torch's stubs lack the constructor and the messages used here
    """A gloo group with a connection to every rank, over the interface that reaches rank 0."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - its only name in older torch
    options._devices = [gloo.create_device(hostname=rendezvous.host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=deadline_s)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    return gloo(PrefixStore(key, rendezvous.store), rank, world_size, options)


def _ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, in at least float32, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    exact = wide if parts[0].is_floating_point() else parts[0].dtype
    total = parts[0].to(exact, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
