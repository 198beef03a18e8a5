"""The abacus before torch: what kind of device it is, and which ones there are."""

from collections.abc import Sequence

from typing_extensions import override

from backends.plugin import Backend, BackendConfig, ChipDescription

FRAMES = 4


class AbacusBackend(Backend):
    """Four abaci on every machine."""

    runtime_module = "polychip_abacus.runtime:AbacusRuntime"
    auto_rank = None

    @override
    def device_type(self) -> str:
        return "abacus"

    @override
    def enumerate_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:
        return [
            ChipDescription(index, f"abacus with {FRAMES} frames, number {index}", 8 << 30)
            for index in range(FRAMES)
        ]
