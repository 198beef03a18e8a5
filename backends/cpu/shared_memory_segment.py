"""The segment of memory that the ranks of a group share for one epoch, as a file in /dev/shm.

It has a name only while the ranks meet: rank 0 removes the name once all have mapped it, and the
memory goes with the last process. Names of processes that died before that are removed by the next.
"""

import ctypes
import mmap
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path

from backends.errors import BackendUnavailable

FOLDER = Path("/dev/shm")
_PREFIX = "polychip"
# Fields of /proc/PID/stat between the process's name and its start time.
_FIELDS_TO_START = 19


class Segment:
    """A mapped segment; stays mapped for as long as somebody refers to it."""

    def __init__(self, path: Path, descriptor: int, size_bytes: int) -> None:
        """Closes the descriptor."""
        try:
            self._mapping = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        self.path = path
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    @classmethod
    def create(cls, key: str, size_bytes: int, folder: Path = FOLDER) -> "Segment":
        """A segment of zeros. Raises BackendUnavailable naming the size if there is no room."""
        _remove_abandoned(folder)
        path = folder / ".".join(
            (_PREFIX, *_own_process(), f"{zlib.crc32(key.encode()):08x}", secrets.token_hex(4))
        )
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendUnavailable(f"cannot make shared memory: {error}") from error
        try:
            # All pages now: one that is missing later would end the process that touches it.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.close(descriptor)
            path.unlink()
            raise BackendUnavailable(
                f"no room in {folder} for the {size_bytes} bytes of shared memory of a group "
                f"({error.strerror}); enlarge it, for a container with --shm-size"
            ) from error
        return cls(path, descriptor, size_bytes)

    @classmethod
    def map(cls, name: str, size_bytes: int, folder: Path = FOLDER) -> "Segment":
        """The segment another rank made. Raises BackendUnavailable if it is not here."""
        path = folder / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return cls(path, descriptor, size_bytes)
        except (OSError, ValueError) as error:
            raise BackendUnavailable(f"cannot map the segment of rank 0: {error}") from error

    def close(self) -> None:
        """Removes the name: nobody can map it from now on; who did keeps it."""
        with suppress(FileNotFoundError):
            self.path.unlink()


def _own_process() -> tuple[str, str, str]:
    pid = os.getpid()
    return str(_pid_namespace()), str(pid), str(_process_started(pid))


def _remove_abandoned(folder: Path) -> None:
    """Segments whose maker died while the ranks met."""
    namespace = str(_pid_namespace())
    for path in folder.glob(f"{_PREFIX}.{namespace}.*"):
        _, _, pid, started, *_ = path.name.split(".")
        if str(_process_started(int(pid))) != started:
            # Another rank may have seen it too; another user's is not ours to remove.
            with suppress(OSError):
                path.unlink()


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _process_started(pid: int) -> int:
    """In clock ticks since boot; 0 if it ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()
    # A killed process stays in the table until its parent asks for its status.
    return 0 if state in ("Z", "X") else int(fields[_FIELDS_TO_START - 1])
