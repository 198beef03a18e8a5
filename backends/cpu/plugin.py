"""The cpu backend before torch: which cores make a chip, and what they can compute."""

import os
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from backends.cpu.host import CpuChip, has_bfloat16, host_memory
from backends.cpu.options import (
    CHIPS_PER_CORE,
    DEVICE_IDS,
    INSTRUCTIONS,
    KERNELS,
    check_options,
    chips_per_core_max,
    chosen,
)
from backends.errors import BackendUnavailable
from backends.plugin import Backend, BackendConfig, Capabilities, ChipDescription
from kernels.library import LibraryUnusable, open_library


class CpuBackend(Backend):
    """CPU cores as chips: each chip is a set of the cores this process may run on.

    The option `device-ids=a,b,...` gives the host chips of these ids, to try lists of devices.
    What computes is known from `on_init` on, and so whether it can capture, and which dtype is the
    faster one.
    """

    runtime_module = "backends.cpu.runtime:CpuRuntime"
    auto_rank = 1000  # Behind every accelerator.

    def __init__(self, variant: str = "") -> None:
        super().__init__(variant)
        self.capabilities = Capabilities(
            dtypes=_dtypes(None),
            block_alignment_bytes=512,
        )
        # Read once: opening a chip narrows this process to the chip's own cores.
        self._cores = tuple(sorted(os.sched_getaffinity(0)))

    @override
    def device_type(self) -> str:
        return "cpu"

    @override
    def enumerate_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:
        return [
            self._chip(index, device_id, config)
            for index, device_id in enumerate(_device_ids(config))
        ]

    @override
    def select_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:
        """The cores go by the place in the list, so that those chosen share as few as possible."""
        return [
            self._chip(chip.index, chip.device_id, config) for chip in super().select_chips(config)
        ]

    def _chip(self, index: int, device_id: str, config: BackendConfig) -> CpuChip:
        cores = self._cores_of_chip(index, config)
        return CpuChip(
            index=index,
            description="cores " + ",".join(map(str, cores)),
            memory_bytes=host_memory().total // config.chips_on_host,
            device_id=device_id,
            cores=cores,
        )

    @override
    def on_init(self, config: BackendConfig) -> None:
        check_options(config.options)
        if config.chips_on_host < 1:
            raise BackendUnavailable(
                f"chips on host is {config.chips_on_host}; the cpu backend needs at least 1"
            )
        known = self.capabilities.dtypes
        if config.dtype != "auto" and config.dtype not in known:
            raise BackendUnavailable(
                f"dtype is {config.dtype!r}; the cpu backend computes in {' or '.join(known)}: "
                "choose one of them, or auto"
            )
        instructions = _native_instructions(config)
        self.capabilities = replace(
            self.capabilities,
            dtypes=_dtypes(instructions),
            can_capture=instructions is not None,
        )
        # OpenMP reads it when torch is imported. Its threads otherwise spin at every barrier, and
        # one busy process beside them then makes a step forty times as long (measured).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251

    @override
    def warnings(self, config: BackendConfig) -> Sequence[str]:
        count = len(self._cores)
        if config.chips_on_host <= count:
            return ()
        told = f"{config.chips_on_host} chips have {'1 core' if count == 1 else f'{count} cores'}"
        remedy = f"ask for {count} at most with --chips or --groups"
        most = chips_per_core_max(config.options) * count
        if config.chips_on_host > most:
            raise BackendUnavailable(
                f"{told}, which is above the limit of {most}; {remedy}, or allow more with "
                f"--backend-option {CHIPS_PER_CORE}={-(-config.chips_on_host // count)}"
            )
        return (f"{told}: some share one and wait for each other; {remedy}",)

    def _cores_of_chip(self, index: int, config: BackendConfig) -> tuple[int, ...]:
        """floor(cores / chips) cores, at least one; shared where chips exceed cores."""
        each = max(1, len(self._cores) // config.chips_on_host)
        return tuple(
            self._cores[(index * each + place) % len(self._cores)] for place in range(each)
        )


def _native_instructions(config: BackendConfig) -> str | None:
    """What the native kernels compute in; None if torch computes, which records no programs."""
    kernels = chosen(config.options, KERNELS)
    if kernels == "torch":
        return None
    try:
        best: int = open_library().polychip_best_instructions()
    except LibraryUnusable:
        return None
    return INSTRUCTIONS[best] if kernels == "auto" else kernels


def _dtypes(instructions: str | None) -> tuple[str, ...]:
    """The faster one first. In vectors of AVX2 bfloat16 is widened as it is read: its prompts take
    somewhat longer than those of float32, its decode steps read half as much; see
    docs/performance.md.
    """
    widened = instructions not in (None, "portable")
    return ("bfloat16", "float32") if widened or has_bfloat16() else ("float32", "bfloat16")


def _device_ids(config: BackendConfig) -> Sequence[str]:
    """The ids of the host's chips; the empty id of a chip that is known by its number."""
    listed = config.options.get(DEVICE_IDS)
    return [""] * config.chips_on_host if listed is None else listed.split(",")
