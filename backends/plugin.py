"""What a backend is before any chip is touched: its name, capabilities, lifecycle hooks, registry.

This module imports no torch: `on_init` runs before torch does, because some vendors read their
environment when torch is imported. The tensor contracts are in `backends.interface`; the module a
backend names in `runtime_module` is imported after `on_init`.
"""

import importlib
import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from backends.errors import (
    BackendError,
    BackendUnavailable,
    IncompatibleBackend,
    UnknownBackend,
)

# Major: a backend written for another major version is refused. Minor: only additions.
API_VERSION = (1, 0)

ENTRY_POINT_GROUP = "polychip.backends"
AUTO = "auto"
BUILT_IN = {"cpu": "backends.cpu.plugin:CpuBackend", "sim": "backends.sim.plugin:SimBackend"}


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, as data, readable before anything is acquired. Defaults are "no".

    dtypes are names such as "float32"; the first one, from `on_init` on, is the one `auto` takes.
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
    """Names of operations the backend does not have at all, and of features that its operations
    do not have, such as "attention:window"; see `kernels.spec`."""


@dataclass(frozen=True)
class BackendConfig:
    """What a worker tells its backend at start.

    chip_indices: the chips this process may use, positions in `devices`.
    devices: ids of the chips the service may use, in its own order; empty: all, as enumerated.
    options: backend-specific settings, name to text, from the command line.
    """

    chip_indices: tuple[int, ...]
    devices: tuple[str, ...] = ()
    chips_on_host: int = 1
    dtype: str = "auto"
    memory_limit_bytes: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


COMMUNICATOR_HOST = "communicator-host"
"""The option of every backend that names this machine for ranks on others."""


def refuse_unknown_options(make: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Raises BackendUnavailable naming an option that is not known, and those that are."""
    for name in options:
        if name not in known:
            raise BackendUnavailable(
                f"the {make} backend has no option {name!r}; it has {', '.join(known)}"
            )


@dataclass(frozen=True)
class ChipDescription:
    """A chip as a backend enumerates it; memory is 0 where it is unknown.

    index: its position, in the backend's enumeration or in `BackendConfig.devices`.
    """

    index: int
    description: str
    memory_bytes: int = 0
    device_id: str = ""
    """What the vendor's tools call it, where that is not the index."""

    @property
    def known_as(self) -> str:
        """The id a list of devices names it by."""
        return self.device_id or str(self.index)


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
    variants: Mapping[str, str] = MappingProxyType({})
    """What may follow the name after a colon, each with its meaning, such as profiles of a make."""
    auto_rank: int | None = 100
    """`auto` tries backends in ascending order of this; None: only when it is named."""
    capabilities: Capabilities = Capabilities()
    runtime_module: str = ""
    """`module:Class` of the `backends.interface.BackendRuntime`; imported after `on_init`."""

    def __init__(self, variant: str = "") -> None:
        """variant: one of `variants`, or empty for the default."""
        self.variant = variant

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

    def select_chips(self, config: BackendConfig) -> Sequence[ChipDescription]:
        """The chips of `config.devices`, in that order and numbered by it; all if it is empty.

        Raises BackendUnavailable naming an id that is not there or stands there twice.
        """
        enumerated = self.enumerate_chips(config)
        if not config.devices:
            return enumerated
        known = {chip.known_as: chip for chip in enumerated}
        repeated = sorted({each for each in config.devices if config.devices.count(each) > 1})
        if repeated:
            raise BackendUnavailable(f"device {repeated[0]!r} is listed twice; name each one once")
        for device_id in config.devices:
            if device_id not in known:
                there = ", ".join(known) or "none"
                raise BackendUnavailable(
                    f"no device {device_id!r}; devices of {self.device_type()}: {there}"
                )
        return [
            replace(known[device_id], index=position, device_id=device_id)
            for position, device_id in enumerate(config.devices)
        ]

    def warnings(self, config: BackendConfig) -> Sequence[str]:  # noqa: ARG002
        """Told to people before they serve so: what is worse than they may think, and a remedy.

        After `on_init`, for all chips of a service together. Raises BackendUnavailable, with the
        limit, where it is so bad that nobody can mean it.
        """
        return ()

    def on_device_acquire(self, config: BackendConfig) -> AcquireResult:
        """The wanted chips that are there; `BackendRuntime.acquire` then opens and probes them.

        A chip that is missing is rejected with its reason, and the others go on.
        """
        known = {chip.index: chip for chip in self.select_chips(config)}
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
    registered = {entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(BUILT_IN) + sorted(registered.difference(BUILT_IN))


def find_backend(name: str) -> Backend:
    """The backend called `name`, or `name:variant`, checked against this interface.

    Nothing is opened. Raises UnknownBackend, IncompatibleBackend, or whatever the backend's own
    module raises.
    """
    name, _, variant = name.partition(":")
    backend_class = _load_class(name)
    if not (inspect.isclass(backend_class) and issubclass(backend_class, Backend)):
        raise IncompatibleBackend(f"backend {name!r}: {backend_class!r} is not a Backend class")
    check_compatible(name, backend_class)
    if variant and variant not in backend_class.variants:
        choice = (
            f"choose {', '.join(backend_class.variants)}"
            if backend_class.variants
            else "it has none"
        )
        raise UnknownBackend(f"backend {name!r} has no variant {variant!r}; {choice}")
    return backend_class(variant)


@dataclass(frozen=True)
class AutoChoice:
    """What `auto` came to: the backend, its name, and why each one before it was rejected.

    Of a backend that was named, none was.
    """

    name: str
    backend: Backend
    rejected: tuple[tuple[str, str], ...]


def ready_backend(name: str, config: BackendConfig) -> AutoChoice:
    """The backend called `name`, or the one `auto` finds, after `on_init`; torch is not imported.

    Raises as `find_backend`, `on_init` and `choose_backend` do.
    """
    if name == AUTO:
        return choose_backend(config)
    backend = find_backend(name)
    backend.on_init(config)
    return AutoChoice(name, backend, ())


def choose_backend(config: BackendConfig) -> AutoChoice:
    """Tries the backends that may be chosen unasked, in the order of `auto_rank`; runs `on_init`.

    One that raises anything is rejected with that, and the next is tried. Raises BackendUnavailable
    naming every backend that was tried and why it was rejected.
    """
    rejected: list[tuple[str, str]] = []
    candidates: list[tuple[int, str, Backend]] = []
    for name in backend_names():
        try:
            backend = find_backend(name)
        except Exception as error:  # noqa: BLE001 - a vendor's module raises anything
            rejected.append((name, reason_of(error)))
            continue
        if backend.auto_rank is not None:
            candidates.append((backend.auto_rank, name, backend))
    for _, name, backend in sorted(candidates, key=lambda each: each[:2]):
        problem = _why_unusable(backend, config)
        if problem is None:
            return AutoChoice(name, backend, tuple(rejected))
        rejected.append((name, problem))
    tried = "; ".join(f"{name}: {problem}" for name, problem in rejected)
    raise BackendUnavailable(f"no backend can serve on this machine: {tried}")


def _why_unusable(backend: Backend, config: BackendConfig) -> str | None:
    try:
        backend.on_init(config)
        return None if backend.select_chips(config) else "it finds no chip"
    except Exception as error:  # noqa: BLE001 - a vendor's code raises anything
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """An error for people: our own speak for themselves, a vendor's is named by its type too."""
    name, text = type(error).__name__, str(error)
    if not text:
        return name
    return text if isinstance(error, BackendError) else f"{name}: {text}"


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
    found = [
        entry
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        if entry.name == name
    ]
    # Whichever were taken, somebody would believe to run the other one.
    if len(found) + (name in BUILT_IN) > 1:
        packages = " and ".join(sorted(map(_package_of, found)))
        also = "also built in" if name in BUILT_IN else "so twice"
        raise IncompatibleBackend(
            f"backend {name!r} is registered by {packages}, and {also}; uninstall one package or "
            "rename its backend"
        )
    if name in BUILT_IN:
        return load_object(BUILT_IN[name])
    if found:
        return found[0].load()
    raise UnknownBackend(f"no backend {name!r}; known backends: {', '.join(backend_names())}")


def _package_of(entry: importlib.metadata.EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else repr(entry.value)


def load_object(path: str) -> object:
    """The object `module:name` refers to."""
    module, separator, attribute = path.partition(":")
    if not separator:
        raise BackendUnavailable(f"{path!r} is not of the form module:name")
    return getattr(importlib.import_module(module), attribute)
