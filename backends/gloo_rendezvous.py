"""The meeting point of an epoch: a key-value store on rank 0 where the ranks find each other.

Only its address travels (rank 0 -> control plane -> other ranks); the store itself stays with the
process that hosts it for as long as the communicator made from it.
"""

import json
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from backends.errors import CommunicatorError, CommunicatorTimeout

LOOPBACK = "127.0.0.1"
_BACKLOG = 64


@dataclass(frozen=True, eq=False)
class GlooRendezvous:
    """One end of a meeting point: `store` is open, `address` is what the other ranks join by."""

    store: Store
    address: bytes
    host: str

    @classmethod
    def open(cls, deadline_s: float, host: str = LOOPBACK) -> "GlooRendezvous":
        """Hosts a store on a free port of `host`, an address that the other ranks can reach.

        Raises CommunicatorError if the address is not this machine's.
        """
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
        except OSError as error:
            listener.close()
            raise CommunicatorError(f"cannot listen on {host}: {error}") from error
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            # Our own socket: the store would listen on every interface.
            master_listen_fd=listener.detach(),
        )
        return cls(store, json.dumps({"host": host, "port": port}).encode(), host)

    @classmethod
    def join(cls, address: bytes, deadline_s: float) -> "GlooRendezvous":
        """Connects to a hosted store. Raises CommunicatorTimeout if it does not answer."""
        try:
            fields = json.loads(address)
            host, port = str(fields["host"]), int(fields["port"])
        except (ValueError, KeyError, TypeError) as error:
            raise CommunicatorError(f"not the address of a meeting point: {address!r}") from error
        try:
            store = TCPStore(host, port, timeout=timedelta(seconds=deadline_s))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise CommunicatorTimeout(f"no meeting point at {host}:{port}: {error}") from error
        return cls(store, address, _own_address_towards(host, port))


def _own_address_towards(host: str, port: int) -> str:
    """The address of the interface that reaches `host`; a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
