"""What a backend is before any chip is touched: its name, capabilities, lifecycle hooks, registry.

This module imports no torch: `on_init` runs before torch does, because some vendors read their
environment when torch is imported. The tensor contracts are in `backends.interface`; the module a
backend names in `runtime_module` is imported after `on_init`.
"""

import importlib
import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.errors import BackendUnavailable, IncompatibleBackend, UnknownBackend

# Major: a backend written for another major version is refused. Minor: only additions.
API_VERSION = (1, 0)

ENTRY_POINT_GROUP = "polychip.backends"
BUILT_IN = {"cpu": "backends.cpu.plugin:CpuBackend"}


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, as data, readable before anything is acquired. Defaults are "no".

    dtypes are names such as "float32"; the first is the one `auto` takes.
    """

    dtypes: tuple[str, ...] = ("float32",)
    block_tokens_multiple: int = 1
    """A KV block is a multiple of this many tokens."""
    block_alignment_bytes: int = 512
    batch_invariant: bool = False
    """A row's result does not depend on the batch or chunk it is computed in."""
    can_abort: bool = False
    """A hung collective can be aborted without ending the process."""
    can_capture: bool = False
    """`Device.capture` records a program; otherwise it runs eagerly."""
    async_collectives: bool = False
    """A collective returns before it is done."""
    rows_max: int = 1 << 16
    """Most rows of a step the kernels accept."""
    unsupported: frozenset[str] = frozenset()
    """Names of operations the backend does not have at all."""


@dataclass(frozen=True)
class BackendConfig:
    """What a worker tells its backend at start.

    chip_indices: the chips this process may use, positions in the backend's own enumeration.
    options: backend-specific settings, name to text, from the command line.
    """

    chip_indices: tuple[int, ...]
    chips_on_host: int = 1
    dtype: str = "auto"
    memory_limit_bytes: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChipDescription:
    """A chip as a backend enumerates it; memory is 0 where it is unknown."""

    index: int
    description: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class AcquireResult:
    """Chips that opened, and why the others did not."""

    granted: tuple[ChipDescription, ...]
    rejected: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelLoadPlan:
    """What is about to be loaded on a chip: sizes in bytes, place in the group."""

    architecture: str
    weight_bytes: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class FaultEvent:
    """A fault the worker met; step_id is 0 outside a step."""

    error: Exception
    step_id: int


class Backend(ABC):
    """A make of chip. Subclasses override `device_type`, `enumerate_chips`, name `runtime_module`.

    Hooks are called by the worker in this order: `on_init`, `on_device_acquire`, `on_model_load`
    (once per formation of a group), `on_request_end` (once per released slot), `on_fault`,
    `on_shutdown`. Every hook has a default. All but `on_init` are called by the compute thread, and
    never two at once. A BackendError from `on_init` or `on_device_acquire` ends the process; an
    error from `on_model_load` or `on_request_end` ends the epoch; the other two must not raise.
    """

    api_version: tuple[int, int] = API_VERSION
    capabilities: Capabilities = Capabilities()
    runtime_module: str = ""
    """`module:Class` of the `backends.interface.BackendRuntime`; imported after `on_init`."""

    @abstractmethod
    def device_type(self) -> str:
        """The kind of device, such as "cpu"; for people and records, never for branching."""

    @abstractmethod
    def enumerate_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:
        """All chips of this make on the machine, in a stable order. Acquires nothing."""

    def on_init(self, config: BackendConfig) -> None:  # noqa: B027 - optional
        """Parse and validate only: no torch, no device memory, no communicator.

        Raises BackendUnavailable if this machine cannot run the backend.
        """

    def on_device_acquire(self, config: BackendConfig) -> AcquireResult:
        """Opens the wanted chips and goes on with fewer; the default grants what is enumerated."""
        known = {chip.index: chip for chip in self.enumerate_chips(config)}
        granted = tuple(known[index] for index in config.chip_indices if index in known)
        rejected = {
            index: f"no chip {index}; this machine has {sorted(known)}"
            for index in config.chip_indices
            if index not in known
        }
        return AcquireResult(granted=granted, rejected=rejected)

    def on_model_load(self, plan: ModelLoadPlan) -> None:  # noqa: B027 - optional
        """The shard described by `plan` is about to be loaded."""

    def on_request_end(self, slot: int) -> None:  # noqa: B027 - optional
        """The request in `slot` ended; what is kept for that slot can be reclaimed."""

    def on_fault(self, event: FaultEvent) -> None:  # noqa: B027 - optional
        """The worker met a fault and is about to leave the epoch."""

    def on_shutdown(self) -> None:  # noqa: B027 - optional
        """The worker is about to exit; called once, also after a fault."""


def backend_names() -> list[str]:
    """Names `find_backend` knows: built-ins, then registered packages."""
    return sorted(BUILT_IN) + sorted(
        entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    )


def find_backend(name: str) -> Backend:
    """The backend called `name`, checked against this interface; nothing is opened.

    Raises UnknownBackend, IncompatibleBackend, or whatever the backend's own module raises.
    """
    backend_class = _load_class(name)
    if not (inspect.isclass(backend_class) and issubclass(backend_class, Backend)):
        raise IncompatibleBackend(f"backend {name!r}: {backend_class!r} is not a Backend class")
    check_compatible(name, backend_class)
    return backend_class()


def check_compatible(name: str, backend_class: type[Backend]) -> None:
    """Refuses another major API version and public overrides that nobody would call."""
    if backend_class.api_version[0] != API_VERSION[0]:
        raise IncompatibleBackend(
            f"backend {name!r} was written for API {backend_class.api_version}, "
            f"this Polychip has {API_VERSION}; install a matching version of either"
        )
    unknown = sorted(
        attribute
        for attribute in vars(backend_class)
        if not attribute.startswith("_") and not hasattr(Backend, attribute)
    )
    if unknown:
        known = sorted(attribute for attribute in vars(Backend) if not attribute.startswith("_"))
        raise IncompatibleBackend(
            f"backend {name!r} overrides unknown names {unknown}; a backend may override {known}"
        )


def _load_class(name: str) -> object:
    registered = {
        entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
    if name in BUILT_IN:
        return load_object(BUILT_IN[name])
    if name in registered:
        return registered[name].load()
    raise UnknownBackend(f"no backend {name!r}; known backends: {', '.join(backend_names())}")


def load_object(path: str) -> object:
    """The object `module:name` refers to."""
    module, separator, attribute = path.partition(":")
    if not separator:
        raise BackendUnavailable(f"{path!r} is not of the form module:name")
    return getattr(importlib.import_module(module), attribute)
