"""The sim backend before torch: which profile, how many chips, and what their ids are."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from typing_extensions import override

from backends.errors import BackendUnavailable
from backends.plugin import Backend, BackendConfig, Capabilities, ChipDescription, ModelLoadPlan
from backends.sim.options import CHIPS_DEFAULT, SimOptions, parse_options
from backends.simulator.faults import parse_faults
from backends.simulator.profile import PROFILES, Profile

VISIBLE_VARIABLE = "SIM_VISIBLE_DEVICES"
"""Physical ids this process may see; it numbers them from 0 in that order, as vendors do."""
DEFAULT_VARIANT = "ideal"


@dataclass(frozen=True)
class SimChip(ChipDescription):
    """A simulated chip: `physical` is its number on the host, `logical` among the visible ones."""

    logical: int = 0
    physical: int = 0


class SimBackend(Backend):
    """Simulated accelerators; each variant has the costs, rules and traps of one kind."""

    runtime_module = "backends.sim.runtime:SimRuntime"
    auto_rank = None
    variants: Mapping[str, str] = MappingProxyType(
        {name: profile.summary for name, profile in PROFILES.items()}
    )

    def __init__(self, variant: str = "") -> None:
        super().__init__(variant or DEFAULT_VARIANT)
        self.capabilities = _capabilities(PROFILES[self.variant])
        # Filled by the runtime: the open chips, and how each is made ready for a model.
        self.opened: dict[object, Callable[[], None]] = {}

    @override
    def device_type(self) -> str:
        return "sim"

    @override
    def on_init(self, config: BackendConfig) -> None:
        options = parse_options(config.options)
        parse_faults(options.faults)
        dtypes = self.capabilities.dtypes
        if config.dtype != "auto" and config.dtype not in dtypes:
            raise BackendUnavailable(
                f"dtype is {config.dtype!r}; the sim backend computes in {' or '.join(dtypes)}: "
                "choose one of them, or auto"
            )
        _visible_chips(_chips_on_host(config, options))
        # OpenMP reads it when torch is imported: threads that spin take the cores that the other
        # simulated chips compute on.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251
        if options.decode_rows_max is not None:
            # The adapters split what a kernel refuses; a limit set by hand is also declared.
            self.capabilities = replace(self.capabilities, rows_max=options.decode_rows_max)

    @override
    def enumerate_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:
        options = parse_options(config.options)
        profile = PROFILES[self.variant]
        return [
            SimChip(
                index=logical,
                description=f"{self.variant} chip {logical}, physical {physical}",
                memory_bytes=options.memory_bytes or profile.memory_bytes.value,
                device_id=str(physical),
                logical=logical,
                physical=physical,
            )
            for logical, physical in enumerate(_visible_chips(_chips_on_host(config, options)))
        ]

    @override
    def on_model_load(self, plan: ModelLoadPlan) -> None:
        """Raises DeviceError or DeviceHung where a fault script says so."""
        for make_ready in self.opened.values():
            make_ready()


def _capabilities(profile: Profile) -> Capabilities:
    return Capabilities(
        dtypes=("float32", "bfloat16"),
        block_tokens_multiple=profile.block_tokens_multiple.value,
        block_alignment_bytes=profile.allocation_alignment_bytes.value,
        can_capture=profile.can_capture.value,
        async_collectives=not profile.blocking_collectives.value,
    )


def _chips_on_host(config: BackendConfig, options: SimOptions) -> int:
    return options.chips or max(CHIPS_DEFAULT, config.chips_on_host)


def _visible_chips(chips_count: int) -> list[int]:
    """Physical ids in logical order. Raises BackendUnavailable for a list that names no chips."""
    # The vendors' variables work like this: below their runtime, for every program alike.
    text = os.environ.get(VISIBLE_VARIABLE, "")  # noqa: TID251
    if not text:
        return list(range(chips_count))
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name.isdecimal() or int(name) >= chips_count or names.count(name) > 1:
            raise BackendUnavailable(
                f"{VISIBLE_VARIABLE} is {text!r}; it must list ids from 0 to {chips_count - 1}, "
                "each once, separated by commas"
            )
    return [int(name) for name in names]
