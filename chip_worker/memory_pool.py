"""How many KV blocks a chip holds: as configured, or what its group wants and memory allows."""

from backends.errors import OutOfMemory
from backends.interface import BackendRuntime, Device, KVSpec, MemoryPool
from chip_worker.config import WorkerConfig

MIB = 1 << 20


def open_memory_pool(
    config: WorkerConfig,
    runtime: BackendRuntime,
    device: Device,
    spec: KVSpec,
    blocks_wanted: int,
) -> MemoryPool:
    """The pool of an epoch; the caller closes it. Raises OutOfMemory naming the remedy."""
    if config.kv_blocks is not None:
        return runtime.create_memory_pool(device, spec, config.kv_blocks)
    block_bytes = runtime.kv_layout(spec).block_bytes
    free_bytes = device.memory_info().free_bytes
    capacity = default_capacity(config, blocks_wanted, block_bytes, free_bytes)
    return runtime.create_memory_pool(device, spec, capacity)


def default_capacity(
    config: WorkerConfig, blocks_wanted: int, block_bytes: int, free_bytes: int
) -> int:
    """Blocks wanted, as far as this chip's share of the free memory, less the reserve, holds them.

    Raises OutOfMemory if that is not even one.
    """
    share_bytes = free_bytes * config.kv_memory_fraction / config.chips_on_host
    affordable = int(share_bytes * (1.0 - config.kv_memory_reserve)) // block_bytes
    if affordable < 1:
        raise OutOfMemory(
            f"a KV block takes {block_bytes / MIB:.1f} MiB; kv_memory_fraction "
            f"{config.kv_memory_fraction} of {free_bytes / MIB:.0f} MiB free, over "
            f"{config.chips_on_host} chips, is less: free memory or set --kv-blocks"
        )
    return min(blocks_wanted, affordable)
