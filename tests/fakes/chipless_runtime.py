"""The runtime of the backend in chipless_backend.py, which imports torch as runtimes do."""

import sys
import time

from backends.errors import DeviceLost
from backends.interface import BackendRuntime, Device
from backends.plugin import ChipDescription

if sys.argv[1] == "import-broken":
    raise ImportError("libvendor.so.7: cannot open shared object file")
if sys.argv[1] == "import-hangs":
    time.sleep(60)


class ChiplessRuntime(BackendRuntime):
    def open_device(self, chip: ChipDescription) -> Device:  # noqa: ARG002
        how = sys.argv[1]
        if how == "lost":
            raise DeviceLost("the chip fell off the bus")
        if how == "broken":
            raise RuntimeError("vendor error 719")
        time.sleep(60)
        raise AssertionError("nobody waits so long")
