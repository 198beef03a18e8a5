"""How the ranks of a group find out whether they share memory: by trying.

    rank 0                                            the others
    makes a segment, offers its name      --offer-->  map it, show a nonce in it
    looks for every nonce in the segment  <-answers-  tell the nonce, or what went wrong
    removes the name, decides            --verdict->  do what rank 0 decided

They talk through the store of the rendezvous. The verdict is the same for all: shared memory, or
the reason why not.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from backends.cpu.shared_memory_communicator import SharedMemoryCommunicator
from backends.cpu.shared_memory_end import SharedMemoryEnd, SharedMemorySettings
from backends.cpu.shared_memory_library import RANKS_MAX, Library
from backends.cpu.shared_memory_segment import Segment
from backends.errors import BackendUnavailable
from backends.gloo_rendezvous import GlooRendezvous
from backends.gloo_work import translate_gloo_errors
from backends.interface import GroupPlace

_NONCE_BITS = 63
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """The ranks do not share memory, or cannot use it; `reason` is for people."""

    reason: str


def join_shared_memory(
    place: GroupPlace,
    rendezvous: GlooRendezvous,
    find_library: Callable[[], Library],
    settings: SharedMemorySettings,
) -> SharedMemoryCommunicator | Refusal:
    """Blocks until all ranks are there; every rank gets the same kind of answer.

    `find_library` may raise BackendUnavailable. Raises PeerLost or CommunicatorTimeout.
    """
    lobby = _Lobby(place, rendezvous)
    joined = (
        _lead(lobby, find_library, settings)
        if place.rank == 0
        else _follow(lobby, find_library, settings)
    )
    if isinstance(joined, Refusal):
        return joined
    joined.start()
    return SharedMemoryCommunicator(joined, place.rank, place.world_size, rendezvous)


class _Lobby:
    """Where the ranks of one epoch leave each other messages; waits until the join deadline."""

    def __init__(self, place: GroupPlace, rendezvous: GlooRendezvous) -> None:
        self.place = place
        self._store = PrefixStore(f"{place.key}/shared memory", rendezvous.store)
        self._deadline = time.monotonic() + place.join_deadline_s

    def post(self, name: str, /, **fields: object) -> None:
        with translate_gloo_errors(self._doing()):
            self._store.set(name, json.dumps(fields))

    def read(self, name: str) -> dict[str, object]:
        left_s = max(0.001, self._deadline - time.monotonic())
        with translate_gloo_errors(self._doing()):
            self._store.wait([name], timedelta(seconds=left_s))
            fields = json.loads(self._store.get(name))
        assert isinstance(fields, dict)
        return fields

    def _doing(self) -> str:
        place = self.place
        return f"rank {place.rank} of {place.world_size} joins {place.key!r}"


def _lead(
    lobby: _Lobby, find_library: Callable[[], Library], settings: SharedMemorySettings
) -> SharedMemoryEnd | Refusal:
    place = lobby.place
    try:
        library = find_library()
        segment = _make_segment(library, place, settings)
    except BackendUnavailable as error:
        lobby.post("offer", refusal=str(error))
        return Refusal(str(error))
    # Whatever happens, the name must not stay.
    end = _open_end(library, segment, place, settings)
    with closing(segment), _left_on_error(end):
        end.join(_new_nonce())
        lobby.post("offer", name=segment.path.name, size_bytes=segment.size_bytes)
        problems = [
            problem
            for rank in range(1, place.world_size)
            if (problem := _problem_of(rank, lobby.read(f"answer {rank}"), end)) is not None
        ]
        verdict = "; ".join(problems) or None
        lobby.post("verdict", refusal=verdict)
    if verdict is not None:
        return Refusal(verdict)
    _log.info("%s: %d ranks share %d bytes", place.key, place.world_size, segment.size_bytes)
    return end


def _problem_of(rank: int, answer: dict[str, object], end: SharedMemoryEnd) -> str | None:
    if "problem" in answer:
        return f"rank {rank}: {answer['problem']}"
    if answer["nonce"] != end.nonce_of(rank):
        # It mapped a segment of that name, but on another machine or in another container.
        return f"rank {rank} has mapped other memory"
    return None


def _follow(
    lobby: _Lobby, find_library: Callable[[], Library], settings: SharedMemorySettings
) -> SharedMemoryEnd | Refusal:
    place = lobby.place
    offer = lobby.read("offer")
    if "refusal" in offer:
        return Refusal(str(offer["refusal"]))
    end: SharedMemoryEnd | None = None
    try:
        library = find_library()
        size_bytes = library.segment_bytes_for(settings.geometry(place.world_size))
        if size_bytes != offer["size_bytes"]:
            raise BackendUnavailable(f"{offer['size_bytes']} bytes offered, {size_bytes} expected")
        segment = Segment.map(str(offer["name"]), size_bytes, settings.folder)
        end = _open_end(library, segment, place, settings)
    except BackendUnavailable as error:
        lobby.post(f"answer {place.rank}", problem=str(error))
    else:
        nonce = _new_nonce()
        with _left_on_error(end):
            end.join(nonce)
            lobby.post(f"answer {place.rank}", nonce=nonce)
    with _left_on_error(end):
        verdict = lobby.read("verdict")["refusal"]
    if verdict is not None:
        return Refusal(str(verdict))
    assert end is not None, "rank 0 chose shared memory although this rank has none"
    return end


def _make_segment(library: Library, place: GroupPlace, settings: SharedMemorySettings) -> Segment:
    if place.world_size > RANKS_MAX:
        raise BackendUnavailable(f"{place.world_size} ranks; shared memory serves {RANKS_MAX}")
    size_bytes = library.segment_bytes_for(settings.geometry(place.world_size))
    return Segment.create(place.key, size_bytes, settings.folder)


def _open_end(
    library: Library, segment: Segment, place: GroupPlace, settings: SharedMemorySettings
) -> SharedMemoryEnd:
    geometry = settings.geometry(place.world_size)
    timing = settings.timing(place.step_deadline_s)
    return SharedMemoryEnd(library, segment, place.rank, geometry, timing)


@contextmanager
def _left_on_error(end: SharedMemoryEnd | None) -> Iterator[None]:
    """An end that nobody will use must not go on beating."""
    try:
        yield
    except BaseException:
        if end is not None:
            end.leave()
        raise


def _new_nonce() -> int:
    # Never 0, which is what the segment holds at first.
    return secrets.randbits(_NONCE_BITS) | 1
