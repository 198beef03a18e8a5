"""A worker process with a backend that tells what was imported when `on_init` ran.

Usage: recording_backend.py FILE [worker arguments]; the backend is called "recording".
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import backends.plugin
from backends.errors import BackendUnavailable
from backends.plugin import Backend, BackendConfig, ChipDescription
from chip_worker.__main__ import main


class RecordingBackend(Backend):
    def device_type(self) -> str:
        return "recording"

    def enumerate_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:  # noqa: ARG002
        return ()

    def on_init(self, config: BackendConfig) -> None:
        Path(sys.argv[1]).write_text(
            f"torch {'torch' in sys.modules} options {dict(config.options)}"
        )
        raise BackendUnavailable("this chip is only for show")


backends.plugin.BUILT_IN["recording"] = f"{__name__}:RecordingBackend"

if __name__ == "__main__":
    main(sys.argv[2:])
