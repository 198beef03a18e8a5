"""Records of calls to a backend's primitives: which are told of, and the last ones before a fault.

call  ──▶ record (begun) ──▶ ring of the last N ──▶ dump() on a fault, oldest first
              │ ended
              └── name matches the pattern ──▶ sink, one record a call
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from time import perf_counter_ns
from typing import Any

from typing_extensions import override

from backends.device import Matrix
from backends.errors import BackendError

ALL = "*"
RING_CALLS = 256


@dataclass(slots=True)
class BackendCall:
    """One call of a primitive; the last two fields tell how it ended.

    shapes, dtypes, bytes_count: of the tensors it was given; of what it returned if it was given
    none. numbers: its other arguments, as far as they are plain numbers. No contents of tensors.
    """

    sequence: int
    layer: str
    """device, memory, kernels or collectives."""
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    bytes_count: int
    numbers: tuple[float, ...]
    stream: str
    """Empty where the chip has but one."""
    implementation: str
    reason: str
    duration_ns: int | None = None
    """Time the host spent in the call, not the chip's own; None while it has not returned."""
    error: str = ""

    @property
    def primitive(self) -> str:
        """Layer and name, as patterns see it."""
        return f"{self.layer}.{self.name}"

    @override
    def __str__(self) -> str:
        """One line for people; also while the call is being recorded, on another thread."""
        tensors = " ".join(
            f"{dtype}{list(shape)}" for dtype, shape in zip(self.dtypes, self.shapes, strict=False)
        )
        numbers = " ".join(f"{number:g}" for number in self.numbers)
        took = "has not returned"
        if self.duration_ns is not None:
            took = f"{self.duration_ns / 1e3:.1f} us"
        parts = (
            f"{self.sequence} {self.primitive}",
            tensors,
            numbers,
            self.implementation,
            took,
            self.error,
        )
        return " | ".join(part for part in parts if part)


class DebugLog:
    """Where the wrappers of `backends.debug` put their records.

    sink: called on the thread that made the call, once it ended; must not raise. pattern: globs
    over "layer.name" with commas between them; it selects what goes to the sink, the ring keeps
    all.
    """

    def __init__(
        self,
        sink: Callable[[BackendCall], None],
        pattern: str = ALL,
        ring_calls: int = RING_CALLS,
        clock_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._sink = sink
        self._globs = tuple(part.strip() for part in pattern.split(","))
        self._selected: dict[str, bool] = {}
        self._ring: deque[BackendCall] = deque(maxlen=ring_calls)
        self._sequence = itertools.count(1)
        self._clock_ns = clock_ns
        self.stream_of_chip: Callable[[], str] = str
        """Names the stream that work goes to; set once a chip is open."""

    def check_pattern(self, primitives: Collection[str]) -> None:
        """Raises BackendError if a part of the pattern selects none of `primitives`."""
        for glob in self._globs:
            if not any(fnmatchcase(primitive, glob) for primitive in primitives):
                raise BackendError(
                    f"--debug-backend: {glob!r} selects no primitive; "
                    f"primitives: {', '.join(sorted(primitives))}"
                )

    def call(
        self,
        layer: str,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        implementation: str = "",
        reason: str = "",
        **named: Any,  # noqa: ANN401 - any primitive
    ) -> Any:  # noqa: ANN401 - any primitive
        """Calls the function, records that, and returns or raises what it does."""
        record = self._begin(layer, name, (*arguments, *named.values()), implementation, reason)
        started_ns = self._clock_ns()
        try:
            result = function(*arguments, **named)
        except BaseException as error:
            record.duration_ns = self._clock_ns() - started_ns
            record.error = f"{type(error).__name__}: {error}"
            self._tell(record)
            raise
        record.duration_ns = self._clock_ns() - started_ns
        if not record.shapes:
            _describe_tensors(record, (result,))
        self._tell(record)
        return result

    def dump(self) -> tuple[BackendCall, ...]:
        """The last calls, oldest first, one that has not returned among them; from any thread."""
        return tuple(self._ring)

    def _begin(
        self, layer: str, name: str, values: tuple[Any, ...], implementation: str, reason: str
    ) -> BackendCall:
        record = BackendCall(
            sequence=next(self._sequence),
            layer=layer,
            name=name,
            shapes=(),
            dtypes=(),
            bytes_count=0,
            numbers=tuple(value for value in values if isinstance(value, int | float)),
            stream=self.stream_of_chip(),
            implementation=implementation,
            reason=reason,
        )
        _describe_tensors(record, values)
        self._ring.append(record)
        return record

    def _tell(self, record: BackendCall) -> None:
        primitive = record.primitive
        selected = self._selected.get(primitive)
        if selected is None:
            selected = any(fnmatchcase(primitive, glob) for glob in self._globs)
            self._selected[primitive] = selected
        if selected:
            self._sink(record)


def _describe_tensors(record: BackendCall, values: tuple[Any, ...]) -> None:
    tensors = list(_tensors(values))
    record.shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    record.dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    record.bytes_count = sum(tensor.nbytes for tensor in tensors)


def _tensors(values: Iterable[Any]) -> Iterator[Matrix]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, Matrix):
            yield value
