"""How many KV blocks a chip takes by itself: what its group wants, as far as memory allows."""

from backends.errors import OutOfMemory
from chip_worker.config import MIB, WorkerConfig


def default_capacity(
    config: WorkerConfig,
    blocks_wanted: int,
    block_bytes: int,
    free_bytes: int,
    *,
    shared: bool = True,
) -> int:
    """Blocks wanted, as far as this chip's share of the free memory, less the reserve, holds them.

    shared: the chips of the host share that memory. Raises OutOfMemory if it is not even one block.
    """
    chips_count = config.chips_on_host if shared else 1
    share_bytes = free_bytes * config.kv_memory_fraction / chips_count
    affordable = int(share_bytes * (1.0 - config.kv_memory_reserve)) // block_bytes
    if affordable < 1:
        raise OutOfMemory(
            f"a KV block takes {block_bytes / MIB:.1f} MiB; kv_memory_fraction "
            f"{config.kv_memory_fraction} of {free_bytes / MIB:.0f} MiB free, over "
            f"{chips_count} chips, is less: free memory, or set fewer --block-tokens or --kv-blocks"
        )
    return min(blocks_wanted, affordable)
