"""Kernel dispatch contract: which implementation computes an operation, chosen when a model binds.

implementations, most preferred first     what each declares    what the model asks
    rotary  fused      rank 0             contiguous input      passes views
    rotary  generic    rank 1             anything              ──▶ bound: generic
    rotary  reference  the last           anything
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from backends.errors import UnsupportedOperation
from kernels.spec import OPERATIONS, Choice, Implementation, Requirement, Support, feature_name

MakeContiguous = Callable[[torch.Tensor], torch.Tensor]
"""A contiguous copy on the same chip, in order with kernels; the same tensor if it is already."""


class KernelTable:
    """One bound function per operation.

    A kernel is chosen here from declared support, never by catching an exception in mid-call: what
    an implementation raises reaches its caller.
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
            bound = ", ".join(self._functions) or "nothing"
            raise UnsupportedOperation(
                f"operation {operation!r} is not bound; bound: {bound}"
            ) from None

    def explain(self) -> tuple[Choice, ...]:
        """What was chosen and why, one row an operation, in the order of `OPERATIONS`."""
        return tuple(self.choices[name] for name in OPERATIONS if name in self.choices)

    def wrapped(
        self, wrap: Callable[[Choice, Callable[..., Any]], Callable[..., Any]]
    ) -> "KernelTable":
        """The same choices with every function replaced by what `wrap` makes of it."""
        return KernelTable(
            {name: wrap(self.choices[name], found) for name, found in self._functions.items()},
            self.choices,
        )


def bind_kernels(
    implementations: Iterable[Implementation],
    requirements: Mapping[str, Requirement],
    *,
    unsupported: Collection[str] = (),
    make_contiguous: MakeContiguous | None = None,
) -> KernelTable:
    """Chooses for each required operation the first implementation, by rank, that supports it.

    Equal ranks keep the order they are given in. unsupported: operations, and features of them, the
    backend declares it does not have, even where the reference could compute them. make_contiguous:
    puts views right for an implementation that needs it; without one, such an implementation is
    rejected where views are passed. Raises UnsupportedOperation naming every candidate and why it
    was rejected.
    """
    by_operation: dict[str, list[Implementation]] = {}
    for implementation in implementations:
        by_operation.setdefault(implementation.operation, []).append(implementation)
    functions: dict[str, Callable[..., Any]] = {}
    choices: dict[str, Choice] = {}
    for operation, requirement in requirements.items():
        if operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise UnsupportedOperation(f"unknown operation {operation!r}; operations: {known}")
        features = (feature_name(operation, each) for each in requirement.features)
        for name in (operation, *features):
            if name in unsupported:
                raise UnsupportedOperation(
                    f"operation {name!r} is declared unsupported by this backend; "
                    "serve a model that does not need it, or use another backend"
                )
        candidates = sorted(by_operation.get(operation, ()), key=lambda each: each.rank)
        choice, chosen = _choose(operation, candidates, requirement, make_contiguous)
        choices[operation] = choice
        functions[operation] = chosen
    return KernelTable(functions, choices)


def _choose(
    operation: str,
    candidates: list[Implementation],
    requirement: Requirement,
    make_contiguous: MakeContiguous | None,
) -> tuple[Choice, Callable[..., Any]]:
    rejected: list[tuple[str, str]] = []
    for position, candidate in enumerate(candidates):
        needs_copies = candidate.support.contiguous and not requirement.contiguous
        copies = make_contiguous if needs_copies and _may_copy(operation) else None
        support = replace(candidate.support, contiguous=False) if copies else candidate.support
        problem = why_unsupported(support, requirement)
        if problem is not None:
            rejected.append((candidate.name, problem))
            continue
        reason = "the first that fits" if rejected else "the most preferred"
        if copies:
            reason += "; views are copied for it"
        behind = f"less preferred than {candidate.name}"
        rejected += [(other.name, behind) for other in candidates[position + 1 :]]
        function = _contiguous(candidate.function, copies) if copies else candidate.function
        return Choice(operation, candidate.name, reason, tuple(rejected)), function
    tried = "; ".join(f"{name}: {problem}" for name, problem in rejected) or "there is none"
    raise UnsupportedOperation(f"no implementation of {operation!r} fits: {tried}")


def _may_copy(operation: str) -> bool:
    """False if it writes into a tensor: what it wrote into a copy would be lost."""
    return set(OPERATIONS[operation].writes) <= {"cache"}


def _contiguous(
    function: Callable[..., Any], make_contiguous: MakeContiguous
) -> Callable[..., Any]:
    """The function behind an adapter for its tensors, of which it writes into none."""

    def adapted(*arguments: Any) -> Any:  # noqa: ANN401 - any operation
        return function(
            *(
                make_contiguous(each) if isinstance(each, torch.Tensor) else each
                for each in arguments
            )
        )

    return adapted


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
    if support.contiguous and not requirement.contiguous:
        return "it needs contiguous tensors, and views are passed"
    missing = [each for each in requirement.features if each not in support.features]
    if missing:
        return f"it does not compute {', '.join(missing)}"
    return None
