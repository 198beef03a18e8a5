"""Measures what ranks of a model hold, in a process of its own: `python -m ... TASK`.

TASK is a `scripts.planning.needs.Task` as JSON. One chip is opened as a worker opens it; no weights
are loaded. What comes back is one JSON object on standard output: {"model": ..., "chip": ...}, or
{"error": text}.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.errors import BackendError
from backends.interface import BackendConfig, BackendRuntime, Device, open_runtime
from backends.plugin import find_backend
from chip_worker.errors import ConfigurationError, ModelError
from chip_worker.shard_loader import ShardLoader, kv_spec
from control_plane.config import KV_POLICIES
from scripts.planning.needs import GroupNeeds, ModelNeeds, RankNeeds, Task, merged


def main() -> None:
    """Prints the result of the task on the command line."""
    # What a vendor's library prints must not come before the result.
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        result = measure(Task(**json.loads(sys.argv[1])))
    except (BackendError, ConfigurationError, ModelError, ImportError) as error:
        result = {"error": str(error)}
    with stream:
        json.dump(result, stream)


def measure(task: Task) -> dict[str, Any]:
    """The result of a task. Raises BackendError, ConfigurationError or ModelError."""
    config = BackendConfig(
        chip_indices=(0,),
        devices=tuple(task.devices),
        chips_on_host=task.chips_on_host,
        dtype=task.dtype,
        options=task.options,
    )
    backend = find_backend(task.backend)
    backend.on_init(config)
    runtime = open_runtime(backend, config)
    loader = ShardLoader(task.model, task.weights)
    chip = backend.select_chips(config)[0]
    device = runtime.open_device(chip)
    try:
        loader.check_device(device)
        needs = _Measuring(loader, runtime, device, task).model_needs()
        memory = device.memory_info()
    finally:
        device.close()
        loader.close()
    return {
        "model": asdict(needs),
        "chip": {
            "free_bytes": memory.free_bytes,
            "shared": memory.shared,
            "description": chip.description,
            "process_bytes": _own_bytes() if memory.shared else 0,
        },
    }


class _Measuring:
    """An open checkpoint and an open chip, asked about ranks."""

    def __init__(
        self, loader: ShardLoader, runtime: BackendRuntime, device: Device, task: Task
    ) -> None:
        self._loader = loader
        self._runtime = runtime
        self._device = device
        self._task = task
        self._dtype = runtime.dtype()

    def model_needs(self) -> ModelNeeds:
        """What every rank of every group size holds."""
        groups: list[GroupNeeds] = []
        refused: list[str] = []
        for size in self._task.sizes:
            groups += merged(self._outcomes(size, refused))
        for size in self._task.larger_sizes:
            groups += merged(self._outcomes(size, []))[:1]
        fingerprint = self._loader.fingerprint()
        return ModelNeeds(
            architecture=fingerprint.architecture,
            digest=fingerprint.digest,
            dtype=str(self._dtype).removeprefix("torch."),
            weights=self._task.weights,
            context_tokens=fingerprint.context_tokens,
            kv_windows=self._loader.kv_groups.windows,
            groups=tuple(groups),
            refused=tuple(refused),
        )

    def _outcomes(self, size: int, refused: list[str]) -> Iterator[GroupNeeds]:
        """Each KV policy by itself; `refused` gets the reasons of those that cannot be."""
        for policy in KV_POLICIES:
            outcome = self._outcome(size, policy)
            if isinstance(outcome, GroupNeeds):
                yield outcome
            else:
                refused.append(outcome)

    def _outcome(self, size: int, policy: str) -> GroupNeeds | str:
        try:
            ranks = tuple(self._rank_needs(rank, size, policy) for rank in range(size))
        except ModelError as error:
            return str(error)
        return GroupNeeds((policy,), ranks)

    def _rank_needs(self, rank: int, size: int, policy: str) -> RankNeeds:
        shard = self._loader.plan(rank, size, policy)
        spec = kv_spec(self._loader.config, shard, self._task.block_tokens, self._dtype)
        return RankNeeds(
            weight_bytes=self._loader.load_plan(shard, self._device, self._dtype).weight_bytes,
            block_bytes=self._runtime.kv_layout(spec).block_bytes,
            query_heads=len(shard.query_heads),
            kv_heads=len(shard.kv_heads),
        )


def _own_bytes() -> int:
    """Memory this process has to itself, with torch and an open chip: about what a worker takes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    own_kib = next(line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(own_kib) * 1024


if __name__ == "__main__":
    main()
