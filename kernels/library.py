"""The native kernels for CPU cores as a file: what `scripts/setup` builds of kernels/cpu."""

import ctypes
import os
from functools import cache
from pathlib import Path

BUILD_VARIABLE = "POLYCHIP_KERNELS_BUILD"
"""Names a folder with another build of them, such as one with sanitizers."""
_BUILD = os.environ.get(BUILD_VARIABLE)  # noqa: TID251 - of whatever process loads them, tests' too
LIBRARY_PATH = Path(_BUILD or Path(__file__).parent / "cpu" / "build") / "libpolychip_kernels.so"
VERSION = 6
"""The interface its callers were written for; kVersion in kernels/cpu/api.cpp."""


class LibraryUnusable(Exception):
    """There is no library, or it is another version's; the message says which and the remedy."""


@cache
def open_library() -> ctypes.CDLL:
    """Its functions are not declared yet. Raises LibraryUnusable."""
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise LibraryUnusable(
            f"no native kernels ({error}): install cmake and a C++ compiler, then run scripts/setup"
        ) from error
    # The symbol is missing in what is no library of these kernels.
    version = getattr(library, "polychip_kernels_version", lambda: "unknown")()
    if version != VERSION:
        raise LibraryUnusable(
            f"{LIBRARY_PATH} is of version {version}, not {VERSION}: run scripts/setup"
        )
    return library
