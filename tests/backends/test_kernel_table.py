"""Kernels are chosen from what they declare, when a model is bound, with every reason kept."""

import pytest
import torch

from backends.errors import UnsupportedOperation
from backends.interface import Requirement
from backends.kernel_table import bind_kernels
from kernels.spec import OPERATIONS, SOFT_CAP, WINDOW, Implementation, Support

PLAIN = Requirement(dtype="float32", rows=8, last_dimension=64)
FEATURED = Requirement(dtype="float32", features=(WINDOW, SOFT_CAP))


def named(name, support=None, rank=0, operation="linear"):
    def function(*arguments):
        return name, arguments

    return Implementation(operation, name, function, support or Support(), rank)


def bound(*implementations, requirement=PLAIN, **settings):
    return bind_kernels(implementations, {"linear": requirement}, **settings)


@pytest.mark.parametrize(
    ("support", "requirement", "reason"),
    [
        (Support(dtypes=("float16",)), PLAIN, "dtype float32 is not one of float16"),
        (Support(layouts=("paged",)), PLAIN, "layout '' is not one of paged"),
        (Support(rows_max=7), PLAIN, "8 rows exceed its limit of 7"),
        (Support(alignment_elements=128), PLAIN, "64 is not a multiple of 128"),
        (Support(contiguous=True), PLAIN, "it needs contiguous tensors, and views are passed"),
        (Support(features=(WINDOW,)), FEATURED, "it does not compute soft_cap"),
    ],
)
def test_what_an_implementation_does_not_declare_it_is_not_asked_for(support, requirement, reason):
    general = named("general", Support(features=(SOFT_CAP, WINDOW)), rank=1)
    table = bound(named("special", support), general, requirement=requirement)
    assert table.dispatch("linear", 1, 2) == ("general", (1, 2))
    (choice,) = table.explain()
    assert choice.implementation == "general"
    assert choice.reason == "the first that fits"
    assert choice.rejected == (("special", reason),)


@pytest.mark.parametrize(
    ("support", "requirement"),
    [
        (Support(dtypes=("float16", "float32")), PLAIN),
        (Support(layouts=("paged",)), Requirement("float32", layout="paged")),
        (Support(rows_max=8), PLAIN),
        (Support(alignment_elements=64), PLAIN),
        (Support(contiguous=True), Requirement("float32", contiguous=True)),
        (Support(features=(SOFT_CAP, WINDOW)), Requirement("float32", features=(WINDOW,))),
    ],
)
def test_what_it_declares_suffices_at_the_very_limit(support, requirement):
    table = bound(named("special", support), named("general", rank=1), requirement=requirement)
    (choice,) = table.explain()
    assert choice.implementation == "special"
    assert choice.reason == "the most preferred"
    assert choice.rejected == (("general", "less preferred than special"),)


def test_rank_decides_and_equal_ranks_keep_their_order():
    table = bound(named("last", rank=2), named("a", rank=1), named("b", rank=1))
    assert table.choices["linear"].implementation == "a"
    assert [name for name, _ in table.choices["linear"].rejected] == ["b", "last"]


def test_none_that_fits_is_refused_with_every_reason():
    with pytest.raises(UnsupportedOperation) as refused:
        bound(named("one", Support(rows_max=1)), named("half", Support(dtypes=("float16",))))
    assert str(refused.value) == (
        "no implementation of 'linear' fits: one: 8 rows exceed its limit of 1; "
        "half: dtype float32 is not one of float16"
    )
    with pytest.raises(UnsupportedOperation, match="plain: it does not compute window, soft_cap"):
        bound(named("plain"), requirement=FEATURED)


def test_what_the_backend_declares_unsupported_is_not_computed_by_another():
    with pytest.raises(UnsupportedOperation, match="'linear' is declared unsupported"):
        bound(named("reference"), unsupported=frozenset({"linear"}))
    capable = named("reference", Support(features=(WINDOW, SOFT_CAP)))
    lacking = frozenset({"linear:window"})
    with pytest.raises(UnsupportedOperation, match="'linear:window' is declared unsupported"):
        bound(capable, requirement=FEATURED, unsupported=lacking)
    assert bound(capable, unsupported=lacking).choices["linear"].implementation == "reference"


def test_unknown_and_unbound_operations_are_named():
    with pytest.raises(UnsupportedOperation, match=r"unknown operation 'lineal'; .*linear"):
        bind_kernels([], {"lineal": PLAIN})
    table = bound(named("only"))
    with pytest.raises(UnsupportedOperation, match="'rotary' is not bound; bound: linear"):
        table.dispatch("rotary")


def test_an_adapter_of_the_backend_makes_views_contiguous_once_bound():
    copied = []

    def make_contiguous(tensor):
        if tensor.is_contiguous():
            return tensor
        copied.append(tensor.shape)
        return tensor.contiguous()

    def strict(x, weight, scale):
        assert x.is_contiguous()
        assert weight.is_contiguous()
        return x @ weight * scale

    kernel = Implementation("linear", "strict", strict, Support(contiguous=True))
    table = bound(kernel, named("general", rank=1), make_contiguous=make_contiguous)
    assert table.choices["linear"].reason == "the most preferred; views are copied for it"
    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    assert torch.equal(table.dispatch("linear", x, weight, 2), x @ weight * 2)
    assert copied == []
    assert torch.equal(table.dispatch("linear", x, weight.T.contiguous().T, 2), x @ weight * 2)
    assert copied == [(3, 4)]


def test_without_a_need_nothing_is_put_in_between():
    kernel = named("plain")
    table = bound(kernel, make_contiguous=lambda tensor: tensor)
    assert table.function("linear") is kernel.function


def test_an_error_in_mid_call_reaches_the_caller():
    def broken(*_arguments):
        raise RuntimeError("the chip said no")

    kernel = Implementation("linear", "broken", broken)
    table = bound(kernel, named("reference", rank=1))
    for call in (lambda: table.dispatch("linear", 1), lambda: table.function("linear")(1)):
        with pytest.raises(RuntimeError, match="the chip said no"):
            call()
    assert table.choices["linear"].implementation == "broken"


def test_the_rows_of_an_explanation_follow_the_operations():
    names = ["sample", "rotary", "embedding"]
    table = bind_kernels(
        [named("x", operation=name) for name in names], dict.fromkeys(names, PLAIN)
    )
    order = [row.operation for row in table.explain()]
    assert order == [name for name in OPERATIONS if name in names]


def test_a_backend_explains_every_operation_it_binds(runtime, backend):
    dtype = str(runtime.dtype()).removeprefix("torch.")
    wanted = {
        name: Requirement(dtype, layout="paged", rows=8, last_dimension=64)
        for name in OPERATIONS
        if name not in backend.capabilities.unsupported
    }
    rows = runtime.bind_kernels(wanted).explain()
    assert [row.operation for row in rows] == list(wanted)
    for row in rows:
        assert row.implementation
        assert row.reason
        others = [name for name, reason in row.rejected if reason]
        assert row.implementation not in others


def test_a_backend_refuses_what_it_declares_unsupported(runtime, backend):
    for name in backend.capabilities.unsupported:
        with pytest.raises(UnsupportedOperation, match=name):
            runtime.bind_kernels({name: PLAIN})
