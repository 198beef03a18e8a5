"""A worker process whose backend is there, but whose chip cannot be opened.

Usage: chipless_backend.py HOW [worker arguments]; the backend is called "chipless".
    HOW   lost: the chip says so; broken: the vendor's library raises; hangs: it never comes back;
          import-broken, import-hangs: the same, but when the vendor's library is imported
"""

import sys
from collections.abc import Sequence

import backends.plugin
from backends.plugin import Backend, BackendConfig, ChipDescription
from chip_worker.__main__ import main


class ChiplessBackend(Backend):
    runtime_module = "tests.fakes.chipless_runtime:ChiplessRuntime"

    def device_type(self) -> str:
        return "chipless"

    def enumerate_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:  # noqa: ARG002
        return tuple(ChipDescription(i, "for show", device_id=f"bus{i}") for i in (0, 1))


backends.plugin.BUILT_IN["chipless"] = f"{__name__}:ChiplessBackend"

if __name__ == "__main__":
    main(sys.argv[2:])
