"""Stand-ins for the objects of a backend that record each call and pass it on.

A stand-in is made from the contract itself, so a method added to a contract is recorded too, and
one that is not overridden never falls to the contract's default.
"""

from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from backends.communicator import Communicator, Work
from backends.debug_records import DebugLog
from backends.device import CapturedProgram, Device, Fence
from backends.memory import MemoryPool
from kernels.spec import OPERATIONS

CREATE_MEMORY_POOL = "create_memory_pool"
CREATE_COMMUNICATOR = "create_communicator"

# Questions, bookkeeping on the host, and what only opens a scope.
_UNRECORDED: dict[type, set[str]] = {
    Device: {"matrix_bytes", "memory_info", "stream_name", "scratch"},
    MemoryPool: {"references", "retain", "release", "allocate", "discard"},
    Communicator: {"group"},
    Work: {"done", "exception"},
    Fence: set(),
    CapturedProgram: set(),
}


def _proxy(contract: Any, layer: str) -> Any:  # noqa: ANN401 - a class made of a class
    """A class that stands in for any object of a contract, which defines all it can do itself."""
    members: dict[str, object] = {"__init__": _init, "__getattr__": _get_attribute}
    for name, member in vars(contract).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            members[name] = _forwarded_property(name)
        elif callable(member):
            recorded = name in _recorded_names(contract)
            members[name] = _recorded_method(layer, name) if recorded else _forwarded_method(name)
    return ABCMeta(f"Debug{contract.__name__}", (contract,), members)


def _recorded_names(contract: type) -> list[str]:
    return [
        name
        for name, member in vars(contract).items()
        if callable(member) and not name.startswith("_") and name not in _UNRECORDED[contract]
    ]


def _init(self: Any, inner: object, log: DebugLog) -> None:  # noqa: ANN401 - any contract
    self._debugged = inner
    self._debug_log = log


def _get_attribute(self: Any, name: str) -> Any:  # noqa: ANN401 - any contract
    """What is no part of the class is an attribute of the object itself, such as its rank."""
    return getattr(self.__dict__["_debugged"], name)


def _forwarded_property(name: str) -> property:
    def read(self: Any) -> Any:  # noqa: ANN401 - any contract
        return getattr(self._debugged, name)

    def write(self: Any, value: object) -> None:  # noqa: ANN401 - any contract
        setattr(self._debugged, name, value)

    return property(read, write)


def _forwarded_method(name: str) -> Callable[..., Any]:
    def forwarded(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - any contract
        return getattr(self._debugged, name)(*arguments, **named)

    return forwarded


def _recorded_method(layer: str, name: str) -> Callable[..., Any]:
    def recorded(self: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - any contract
        log: DebugLog = self._debug_log
        result = log.call(layer, name, getattr(self._debugged, name), arguments, **named)
        return follow(result, log)

    return recorded


def follow(result: Any, log: DebugLog) -> Any:  # noqa: ANN401 - any primitive
    """The result, stood in for where something can still be asked of the chip through it."""
    for contract, make in _FOLLOWED.items():
        if isinstance(result, contract):
            return make(result, log)
    return result


debug_device: Callable[[Device, DebugLog], Device] = _proxy(Device, "device")
debug_memory_pool: Callable[[MemoryPool, DebugLog], MemoryPool] = _proxy(MemoryPool, "memory")
debug_communicator: Callable[[Communicator, DebugLog], Communicator] = _proxy(
    Communicator, "collectives"
)
_FOLLOWED: dict[type, Callable[[Any, DebugLog], Any]] = {
    Work: _proxy(Work, "collectives"),
    Fence: _proxy(Fence, "device"),
    CapturedProgram: _proxy(CapturedProgram, "device"),
}


def primitives() -> set[str]:
    """Every "layer.name" that can be recorded."""
    layers = {
        "device": (Device, Fence, CapturedProgram),
        "memory": (MemoryPool,),
        "collectives": (Communicator, Work),
    }
    found = {f"kernels.{operation}" for operation in OPERATIONS}
    found |= {f"memory.{CREATE_MEMORY_POOL}", f"collectives.{CREATE_COMMUNICATOR}"}
    for layer, contracts in layers.items():
        for contract in contracts:
            found |= {f"{layer}.{name}" for name in _recorded_names(contract)}
    return found
