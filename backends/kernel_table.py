"""Kernel contract: operations by name, chosen when a model is bound, with the reason recorded."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backends.errors import UnsupportedOperation
from kernels.spec import OPERATIONS, Choice, Implementation, Requirement, Support


class KernelTable:
    """One bound function per operation.

    A kernel is chosen here from declared support, never by catching an exception in mid-call.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], choices: Mapping[str, Choice]
    ) -> None:
        self._functions = dict(functions)
        self.choices = dict(choices)

    def dispatch(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - any operation
        """Calls the function bound to `operation`. Raises UnsupportedOperation if none is."""
        return self.function(operation)(*arguments)

    def function(self, operation: str) -> Callable[..., Any]:
        """The bound function itself, for callers that keep it."""
        try:
            return self._functions[operation]
        except KeyError:
            raise UnsupportedOperation(f"operation {operation!r} is not bound") from None


def bind_kernels(
    implementations: Iterable[Implementation], requirements: Mapping[str, Requirement]
) -> KernelTable:
    """Chooses for each required operation the first implementation, by rank, that supports it.

    Raises UnsupportedOperation naming every candidate and why it was rejected.
    """
    by_operation: dict[str, list[Implementation]] = {}
    for implementation in implementations:
        by_operation.setdefault(implementation.operation, []).append(implementation)
    functions: dict[str, Callable[..., Any]] = {}
    choices: dict[str, Choice] = {}
    for operation, requirement in requirements.items():
        if operation not in OPERATIONS:
            raise UnsupportedOperation(f"unknown operation {operation!r}")
        rejected: list[tuple[str, str]] = []
        for candidate in sorted(by_operation.get(operation, []), key=lambda found: found.rank):
            problem = why_unsupported(candidate.support, requirement)
            if problem is None:
                functions[operation] = candidate.function
                reason = "first choice" if not rejected else "the better ones were rejected"
                choices[operation] = Choice(operation, candidate.name, reason, tuple(rejected))
                break
            rejected.append((candidate.name, problem))
        else:
            raise UnsupportedOperation(f"no implementation of {operation!r}: {rejected}")
    return KernelTable(functions, choices)


def why_unsupported(support: Support, requirement: Requirement) -> str | None:
    """The first reason an implementation does not meet a requirement; None if it does."""
    if support.dtypes and requirement.dtype not in support.dtypes:
        return f"dtype {requirement.dtype} is not one of {', '.join(support.dtypes)}"
    if support.layouts and requirement.layout not in support.layouts:
        return f"layout {requirement.layout!r} is not one of {', '.join(support.layouts)}"
    if support.rows_max is not None and requirement.rows > support.rows_max:
        return f"{requirement.rows} rows exceed its limit of {support.rows_max}"
    if requirement.last_dimension % support.alignment_elements:
        return f"{requirement.last_dimension} is not a multiple of {support.alignment_elements}"
    return None
