"""Opens the KV pool of an epoch, as large as configured or as its group wants and memory allows."""

from backends.interface import BackendRuntime, Device, KVSpec, MemoryPool
from chip_worker.config import WorkerConfig
from chip_worker.kv_capacity import default_capacity


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
    memory = device.memory_info()
    capacity = default_capacity(
        config, blocks_wanted, block_bytes, memory.free_bytes, shared=memory.shared
    )
    return runtime.create_memory_pool(device, spec, capacity)
