"""Examines a backend's chips in a process of its own: `python -m scripts.examination TASK`.

TASK is JSON: {"task": "chips" or "rank", "backend", "devices", "chips_on_host", "dtype", "options"}
and what the task needs. One JSON object a line comes back on standard output, first the name of
each step, then what came of it: if this process hangs, the last step is the one that hung.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from typing_extensions import override

from backends.errors import BackendError, BackendUnavailable, UnsupportedOperation
from backends.interface import (
    BackendConfig,
    BackendRuntime,
    Device,
    GroupPlace,
    KVSpec,
    Requirement,
    open_runtime,
)
from backends.plugin import Backend, ChipDescription, find_backend
from backends.probes import probe_communicator
from kernels.spec import FEATURES, OPERATIONS, feature_name

FLOAT32_ONLY = ("soft_cap", "adjust_logits", "sample", "token_logprobs")
"""Whatever dtype the model computes in, what follows its logits is in float32."""
SHOWN_ROWS = 32
SHOWN_WIDTH = 64
BLOCK_TOKENS = 16
FOUND_POLL_S = 0.01


class Teller:
    """Tells the parent of steps and facts."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def tell(self, event: str, **facts: object) -> None:
        """One line, at once."""
        self._stream.write(json.dumps({"event": event, **facts}) + "\n")
        self._stream.flush()

    def probe(self, name: str, function: Callable[[], str | None]) -> bool:
        """Runs a probe; what it returns is told as detail, and what it raises as its failure."""
        self.tell("begin", probe=name)
        started = time.monotonic()
        try:
            detail, ok = function() or "", True
        except BackendError as error:
            detail, ok = f"{type(error).__name__}: {error}", False
        seconds = round(time.monotonic() - started, 3)
        self.tell("probe", probe=name, ok=ok, seconds=seconds, detail=detail)
        return ok


class NoteHandler(logging.Handler):
    """Tells what a backend has to say beside its answers, such as what it does without."""

    def __init__(self, teller: Teller) -> None:
        super().__init__(logging.INFO)
        self._teller = teller

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._teller.tell("note", text=record.getMessage())


def main() -> None:
    """Runs the task on the command line."""
    # What a vendor's library prints must not come between the lines.
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    teller, task = Teller(stream), json.loads(sys.argv[1])
    logger = logging.getLogger("backends")
    logger.addHandler(NoteHandler(teller))
    logger.setLevel(logging.INFO)
    config = BackendConfig(
        chip_indices=tuple(task["chips"]),
        devices=tuple(task["devices"]),
        chips_on_host=task["chips_on_host"],
        dtype=task["dtype"],
        options=task["options"],
    )
    backend = find_backend(task["backend"])
    backend.on_init(config)
    torch.set_num_threads(1)
    if task["task"] == "chips":
        runtime = open_runtime(backend, config)
        tell_operations(teller, backend, runtime)
        teller.tell("note", text=f"collectives by {runtime.collectives()}")
        for chip in backend.on_device_acquire(config).granted:
            examine_chip(teller, backend, replace(config, chip_indices=(chip.index,)), chip)
    else:
        join_group(teller, open_runtime(backend, config), task)


def tell_operations(teller: Teller, backend: Backend, runtime: BackendRuntime) -> None:
    """What computes each operation, and each of its features, in each dtype, and why.

    Opens no chip.
    """
    for dtype in backend.capabilities.dtypes:
        multiple = backend.capabilities.block_tokens_multiple
        block_tokens = -(-BLOCK_TOKENS // multiple) * multiple
        spec = KVSpec(1, 1, SHOWN_WIDTH, block_tokens, getattr(torch, dtype))
        layout = runtime.kv_layout(spec).order
        for operation in OPERATIONS:
            used = "float32" if operation in FLOAT32_ONLY else dtype
            if used != dtype and "float32" in backend.capabilities.dtypes:
                continue
            requirement = Requirement(used, layout, SHOWN_ROWS, SHOWN_WIDTH)
            asked = {operation: requirement} | {
                feature_name(operation, feature): replace(requirement, features=(feature,))
                for feature in FEATURES.get(operation, ())
            }
            for name, each in asked.items():
                found = _choice(runtime, operation, each)
                if {operation, name} & backend.capabilities.unsupported:
                    found |= {"implementation": "none", "ok": True}
                    found["reason"] = "declared unsupported"
                teller.tell("operation", operation=name, dtype=used, **found)


def _choice(runtime: BackendRuntime, operation: str, requirement: Requirement) -> dict[str, Any]:
    try:
        choice = runtime.bind_kernels({operation: requirement}).choices[operation]
    except UnsupportedOperation as error:
        return {"implementation": "none", "ok": False, "reason": str(error), "rejected": []}
    return {
        "implementation": choice.implementation,
        "ok": True,
        "reason": choice.reason,
        "rejected": [list(pair) for pair in choice.rejected],
    }


def examine_chip(
    teller: Teller, backend: Backend, config: BackendConfig, chip: ChipDescription
) -> None:
    """Opens a chip as a worker does, which probes it, and closes it."""

    def acquire() -> str:
        device = _acquired(open_runtime(backend, config))
        info = device.memory_info()
        device.close()
        return f"{info.free_bytes / 1e9:.1f} of {info.total_bytes / 1e9:.1f} GB free"

    teller.probe(f"chip {chip.known_as} opens, copies and multiplies", acquire)


def _acquired(runtime: BackendRuntime) -> Device:
    """The one chip of a runtime. Raises BackendUnavailable with the reason if it has none."""
    acquired = runtime.acquire(1)
    if not acquired.granted:
        raise BackendUnavailable("; ".join(acquired.rejected.values()))
    return acquired.granted[0]


def join_group(teller: Teller, runtime: BackendRuntime, task: Mapping[str, Any]) -> None:
    """One rank of a collective between processes; rank 0 leaves the address in the folder."""
    deadline_s = task["deadline_s"]
    place = GroupPlace(
        rank=task["rank"],
        world_size=task["world_size"],
        key="doctor/epoch1",
        join_deadline_s=deadline_s,
        step_deadline_s=deadline_s,
    )

    def run() -> str:
        device = _acquired(runtime)
        address = _meeting_point(runtime, place, Path(task["folder"]) / "address")
        communicator = runtime.create_communicator(device, place, address)
        probe_communicator(communicator, device, deadline_s)
        communicator.close()
        device.close()
        return f"by {type(communicator).__name__}"

    teller.probe(f"rank {place.rank} of {place.world_size} joins and sums", run)


def _meeting_point(runtime: BackendRuntime, place: GroupPlace, path: Path) -> bytes:
    if place.rank == 0:
        address = runtime.open_rendezvous(place)
        path.with_suffix(".part").write_bytes(address)
        path.with_suffix(".part").rename(path)
        return address
    give_up = time.monotonic() + place.join_deadline_s
    while not path.exists():
        if time.monotonic() > give_up:
            raise BackendError(f"rank 0 opened no meeting point in {place.join_deadline_s:g} s")
        time.sleep(FOUND_POLL_S)
    return path.read_bytes()


if __name__ == "__main__":
    main()
